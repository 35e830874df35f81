"""How per-token losses become one number: as weights, so that the sum over any split of the step is the same.

A weight is divided by a count over the *whole* step and all ranks. Then neither micro-batches nor ranks nor padding
change the loss: summing `loss * weight` over everything, in any order, gives the global mean once (invariant 5,
PITFALLS P14).
"""

from typing import Literal

from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """What this part of the step adds to the denominator: trainable tokens, or sequences having at least one.

    Args:
        mask: [B, T], 1 on trainable tokens.

    Returns:
        scalar float32; sum it over micro-batches and ranks before the first backward.
    """
    if aggregation == "token_mean":
        return mask.sum().float()
    return (mask.sum(dim=1) > 0).sum().float()


def token_mean_weights(mask: Tensor, denominator: float) -> Tensor:
    """Every trainable token of the step weighs the same: DAPO's token-level loss (arXiv:2503.14476, equation 8).

    Args:
        mask: [B, T].
        denominator: number of trainable tokens in the whole step, all ranks; 0 gives weights of 0.

    Returns:
        [B, T] float32.
    """
    return mask.float() / max(denominator, 1.0)


def sequence_mean_weights(mask: Tensor, denominator: float) -> Tensor:
    """Every sequence weighs the same, its tokens share the weight: GRPO (arXiv:2402.03300, equation 3).

    Args:
        mask: [B, T]; rows without a trainable token weigh nothing and are not counted.
        denominator: number of sequences with a trainable token in the whole step, all ranks.

    Returns:
        [B, T] float32.
    """
    tokens = mask.float().sum(dim=1, keepdim=True).clamp(min=1.0)
    return mask.float() / tokens / max(denominator, 1.0)


def weights(mask: Tensor, aggregation: Aggregation, denominator: float) -> Tensor:
    """Weights [B, T] float32 by the aggregation's name; see the two functions above."""
    return (token_mean_weights if aggregation == "token_mean" else sequence_mean_weights)(mask, denominator)
