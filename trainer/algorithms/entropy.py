"""What the entropy of the next-token distribution is used for: a bonus, and the choice of tokens to learn from."""

import math
from collections.abc import Callable

from torch import Tensor


def entropy_bonus(entropy: Tensor, coefficient: float) -> Tensor:
    """-coefficient * H for each token: added to the loss, it keeps the policy from becoming certain too early.

    Williams and Peng 1991 (doi:10.1080/09540099108946587); Mnih et al. 2016 (arXiv:1602.01783), section 4.

    Args:
        entropy: [B, T], nats; carries the gradient.

    Returns:
        [B, T].
    """
    return -coefficient * entropy


def entropy_threshold(count: int, nth_smallest: Callable[[int], float], share: float) -> float:
    """The entropy that the given share of tokens has at least: their (1 - share) quantile, linearly interpolated.

    The tokens are the trainable ones of the whole optimizer step and all ranks: with those of a micro-batch the choice
    would depend on what else is in it.

    Args:
        count: of tokens.
        nth_smallest: of their entropies, in nats, by position from 0.
        share: of tokens to keep, in 0..1; 0.2 in the paper (see `high_entropy_mask`).

    Returns:
        nats; infinity without tokens, so that none is chosen.
    """
    if count == 0:
        return math.inf
    position = (1.0 - share) * (count - 1)
    below, above = nth_smallest(math.floor(position)), nth_smallest(math.ceil(position))
    return below + (above - below) * (position - math.floor(position))


def high_entropy_mask(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The tokens at which the policy decides something: those whose entropy reaches the threshold.

    Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939). There the policy loss is multiplied by
    this mask, and what it is divided by still counts all tokens.

    Args:
        entropy: [B, T], nats.
        mask: [B, T].
        threshold: from `entropy_threshold`.

    Returns:
        [B, T] bool, False wherever `mask` is 0.
    """
    return (entropy.detach().double() >= threshold) & mask.bool()
