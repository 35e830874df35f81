"""How length changes rewards. Dynamic sampling: which groups to train on, and whether to sample more prompts first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, longest: int, margin: int) -> Tensor:
    """0 up to longest - margin tokens, then falling in a straight line to -1 at `longest`, and -1 beyond.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13; there, 4096 of 20480 tokens are the margin. Lengths [N] of the
    sampled tokens, `longest` (usually sampling.max_tokens) and `margin` (0..longest; 0: a step), all in tokens; [N]
    float32, to be added to the reward.
    """
    excess = lengths.float() - (longest - margin)
    return -(excess / margin).clamp(0.0, 1.0) if margin else -(excess > 0).float()


def length_normalized(rewards: Tensor, lengths: Tensor, strength: float) -> Tensor:
    """reward / (1 + strength * length / the group's mean length): of two good answers the shorter is better.

    Multiplicative, so that a wrong answer of reward 0 gains nothing by being short: GR3, Li et al. 2026
    (arXiv:2603.10535). A negative reward would be worth less the longer it is, which is the wrong way round. Rewards
    [P, G], none negative; lengths [P, G] in tokens; strength >= 0 (alpha; 0 changes nothing). [P, G] float32.
    """
    if rewards.numel() and rewards.min() < 0:
        raise ValueError(f"rewards to be normalised by length must be at least 0, not {rewards.min():g}")
    relative = lengths.float() / lengths.float().mean(dim=1, keepdim=True).clamp(min=1.0)
    return rewards.float() / (1.0 + strength * relative)


@dataclass(frozen=True)
class SamplingDecision:
    """The decision after a round of sampling."""

    keep: list[int]  # positions of the groups to train on, ascending; at most as many as wanted
    sample: int  # further prompts to sample before training; 0: train now
    shortfall: int  # how many of the wanted groups have no signal or are not there; only when training begins


def dynamic_sampling(
    informative: Sequence[bool],  # of all groups sampled so far in this step, in the order of prompts
    wanted: int,  # groups to train on, >= 1
    rounds: int,  # of sampling done in this step, >= 1
    max_rounds: int,  # when to give up, >= 1
    oversampling: float = 1.0,  # >= 1; prompts to sample for each missing group, rounded up
    at_bound: str = "fewer",  # or "fill", up with groups without signal, which keeps the step's size
) -> SamplingDecision:
    """Sample until enough groups have rewards that differ, but not for ever.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11 and section 3.2. Surplus groups are dropped, the latest first:
    the choice follows the order of prompts and not that in which answers came in, which would favour short ones.
    At the bound the step trains on the groups there are. While there is more to sample, `keep` are the groups with a
    signal so far; see `advantages.informative`.
    """
    keep = [index for index, differs in enumerate(informative) if differs][:wanted]
    missing = wanted - len(keep)
    if missing and rounds < max_rounds:
        return SamplingDecision(keep, math.ceil(missing * oversampling), 0)
    if at_bound == "fill":
        rest = [index for index, differs in enumerate(informative) if not differs]
        keep = sorted(keep + rest[:missing])
    return SamplingDecision(keep, 0, missing)
