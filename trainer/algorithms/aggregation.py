"""Aggregation of per-token losses into one number, by weights, so that the sum over any split of the step is the same.

A weight is divided by a count over the *whole* step and all ranks. Then neither micro-batches nor ranks nor padding
change the loss: summing `loss * weight` over everything, in any order, gives the global mean once.

Functions take the mask [B, T] and return weights [B, T] float32, 0 where masked. Counts are of the whole step, all
ranks, and may be 0: `tokens` of trainable ones, `sequences` of those with a trainable token.
"""

from __future__ import annotations

from trainer.algorithms.records import Record, Tensor


def token_mean_weights(mask: Tensor, tokens: float) -> Tensor:
    """Every trainable token of the step weighs the same: DAPO's token-level loss (arXiv:2503.14476, equation 8)."""
    return mask.float() / max(tokens, 1.0)


def sequence_mean_weights(mask: Tensor, sequences: float) -> Tensor:
    """Every sequence weighs the same, its tokens share the weight: GRPO (arXiv:2402.03300, equation 3)."""
    tokens = mask.float().sum(dim=1, keepdim=True).clamp(min=1.0)
    return mask.float() / tokens / max(sequences, 1.0)


def sequence_sum_weights(mask: Tensor, sequences: float) -> Tensor:
    """The mean over sequences of the sum over their tokens: the policy gradient without any division by length.

    That is what the likelihood of a whole sequence asks for, as in RLOO (arXiv:2402.14740).
    """
    return mask.float() / max(sequences, 1.0)


def fixed_length_weights(mask: Tensor, sequences: float, longest: int) -> Tensor:
    """The mean of sums, divided by the longest possible answer, in tokens: Dr. GRPO (arXiv:2503.20783).

    A constant in place of the answer's own length, which favours long answers among the bad ones.
    """
    return sequence_sum_weights(mask, sequences) / longest


def weights(mask: Tensor, aggregation: str, tokens: float, sequences: float, longest: int) -> Tensor:
    """Weights [B, T] float32 by the aggregation's name in `AGGREGATIONS`; arguments as of the functions above."""
    counts = {"tokens": tokens, "sequences": sequences, "longest": longest}
    return AGGREGATIONS[aggregation](counts, mask=mask)


AGGREGATIONS = {
    "token_mean": Record(token_mean_weights, "each token weighs the same (DAPO)"),
    "sequence_mean": Record(sequence_mean_weights, "each answer weighs the same, by the mean over its tokens (GRPO)"),
    "sequence_sum": Record(sequence_sum_weights, "each answer weighs the same, by the sum over its tokens (RLOO)"),
    "fixed_length": Record(fixed_length_weights, "as sequence_sum, divided by the longest possible answer (Dr. GRPO)"),
}
"""The aggregations that a recipe can name."""
