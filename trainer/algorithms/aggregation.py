"""How per-token losses become one number: as weights, so that the sum over any split of the step is the same.

A weight is divided by a count over the *whole* step and all ranks. Then neither micro-batches nor ranks nor padding
change the loss: summing `loss * weight` over everything, in any order, gives the global mean once.
"""

from torch import Tensor

from trainer.algorithms.names import Aggregation


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


def sequence_sum_weights(mask: Tensor, denominator: float) -> Tensor:
    """The mean over sequences of the sum over their tokens: the policy gradient without any division by length.

    That is what the likelihood of a whole sequence asks for, as in RLOO (arXiv:2402.14740).

    Args:
        mask: [B, T].
        denominator: number of sequences with a trainable token in the whole step, all ranks.

    Returns:
        [B, T] float32.
    """
    return mask.float() / max(denominator, 1.0)


def fixed_length_weights(mask: Tensor, denominator: float, length: int) -> Tensor:
    """The mean of sums, divided by one length for all: Dr. GRPO (arXiv:2503.20783).

    A constant in place of the answer's own length, which favours long answers among the bad ones.

    Args:
        mask: [B, T].
        denominator: number of sequences with a trainable token in the whole step, all ranks.
        length: the longest answer that could be sampled, tokens.

    Returns:
        [B, T] float32.
    """
    return sequence_sum_weights(mask, denominator) / length


def weights(mask: Tensor, aggregation: Aggregation, denominator: float, length: int | None = None) -> Tensor:
    """Weights [B, T] float32 by the aggregation's name; see the four functions above."""
    if aggregation == "token_mean":
        return token_mean_weights(mask, denominator)
    if aggregation == "sequence_mean":
        return sequence_mean_weights(mask, denominator)
    if aggregation == "sequence_sum":
        return sequence_sum_weights(mask, denominator)
    if length is None:
        raise ValueError("the aggregation fixed_length needs a length: give the longest answer that could be sampled")
    return fixed_length_weights(mask, denominator, length)
