"""Dynamic sampling: which groups to train on, and whether to sample more prompts first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.algorithms.names import AtBound


@dataclass(frozen=True)
class SamplingDecision:
    """What to do after a round of sampling.

    Attributes:
        keep: positions of the groups to train on, ascending; at most as many as wanted.
        sample: further prompts to sample before training; 0: train now.
        shortfall: how many of the wanted groups have no signal or are not there; only when training begins.
    """

    keep: list[int]
    sample: int
    shortfall: int


def dynamic_sampling(
    informative: Sequence[bool],
    wanted: int,
    rounds: int,
    max_rounds: int,
    oversampling: float = 1.0,
    at_bound: AtBound = "fewer",
) -> SamplingDecision:
    """Sample until enough groups have rewards that differ, but not for ever.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11 and section 3.2. What is over is dropped, the latest first, so
    that the choice follows the order of prompts and not that in which answers came in, which would favour short ones.
    At the bound the run goes on with what there is.

    Args:
        informative: of all groups sampled so far in this step, in the order of prompts; see `advantages.informative`.
        wanted: groups to train on, >= 1.
        rounds: of sampling done in this step, >= 1.
        max_rounds: when to give up, >= 1.
        oversampling: >= 1; prompts to sample for each missing group, rounded up.
        at_bound: train on fewer groups, or fill up with groups without signal, which keeps the step's size.

    Returns:
        see `SamplingDecision`; while there is more to sample, `keep` are the groups with a signal so far.
    """
    keep = [index for index, differs in enumerate(informative) if differs][:wanted]
    missing = wanted - len(keep)
    if missing and rounds < max_rounds:
        return SamplingDecision(keep, math.ceil(missing * oversampling), 0)
    if at_bound == "fill":
        rest = [index for index, differs in enumerate(informative) if not differs]
        keep = sorted(keep + rest[:missing])
    return SamplingDecision(keep, 0, missing)
