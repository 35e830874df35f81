"""Shaping of rewards by length, and dynamic sampling, which decides which groups to train on or
sample next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, longest: int, margin: int) -> Tensor:
    """Return a penalty of 0 up to longest - margin tokens, falling in a straight line to -1 at
    `longest`, and -1 beyond.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13, where the margin is 4096 of 20480 tokens.
    Takes lengths [N], `longest` (usually sampling.max_tokens) and `margin` (0..longest; 0: a step
    function), all in sampled tokens. Returns [N] float32, to be added to the reward.
    """
    excess = lengths.float() - (longest - margin)
    return -(excess / margin).clamp(0.0, 1.0) if margin else -(excess > 0).float()


def length_normalized(rewards: Tensor, lengths: Tensor, strength: float) -> Tensor:
    """Return reward / (1 + strength * length / the group's mean length): of two good answers the
    shorter one is better.

    The factor is multiplicative, so that a wrong answer of reward 0 gains nothing by being short:
    GR3, Li et al. 2026 (arXiv:2603.10535). It would shrink a negative reward the more the longer
    the answer is, so those raise ValueError. Rewards are [P, G]; lengths [P, G] are in tokens;
    strength >= 0 is the paper's alpha (0 changes nothing). Returns [P, G] float32.
    """
    if rewards.numel() and rewards.min() < 0:
        raise ValueError(f"rewards to be normalised by length must be at least 0, not {rewards.min():g}")
    relative = lengths.float() / lengths.float().mean(dim=1, keepdim=True).clamp(min=1.0)
    return rewards.float() / (1.0 + strength * relative)


@dataclass(frozen=True)
class SamplingDecision:
    """The decision after a round of sampling: train, or sample more."""

    keep: list[int]  # positions of the groups to train on, ascending; at most `wanted`
    sample: int  # further prompts to sample before training; 0: train now
    # Number of wanted groups that have no signal or do not exist; 0 unless training begins
    shortfall: int


def dynamic_sampling(
    # One entry for each group sampled so far in this step, in the order of prompts
    informative: Sequence[bool],
    wanted: int,  # number of groups to train on, >= 1
    rounds: int,  # rounds of sampling done so far in this step, >= 1
    max_rounds: int,  # most rounds of sampling, >= 1
    oversampling: float = 1.0,  # >= 1; prompts to sample for each missing group, rounded up
    # Or "fill": fill up with groups without signal, which keeps the step's size
    at_bound: str = "fewer",
) -> SamplingDecision:
    """Decide, after a round of sampling, whether to sample more prompts and which groups to train
    on.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11 and section 3.2. A group has a signal if
    its rewards differ (`advantages.informative`). Surplus groups are dropped, the latest first, in
    the order of prompts; the order in which answers came in would favour short ones. After the last
    round the step trains on the groups that there are. If there is more to sample, `keep` has the
    groups with a signal so far.
    """
    keep = [index for index, differs in enumerate(informative) if differs][:wanted]
    missing = wanted - len(keep)
    if missing and rounds < max_rounds:
        return SamplingDecision(keep, math.ceil(missing * oversampling), 0)
    if at_bound == "fill":
        rest = [index for index, differs in enumerate(informative) if not differs]
        keep = sorted(keep + rest[:missing])
    return SamplingDecision(keep, 0, missing)
