"""Aggregation of per-token losses into one number, by weights that make the sum the same for any
split of the step.

A weight is divided by a count over the *whole* step and all ranks. Then neither micro-batches nor
ranks nor padding change the loss: the sum of `loss * weight` over everything, in any order, is the
global mean.

Functions take the mask [B, T] and return weights [B, T] float32, 0 where masked. Counts are over
the whole step and all ranks, and may be 0: `tokens` counts trainable tokens, and `sequences` counts
sequences that have one.
"""

from __future__ import annotations

from trainer.algorithms.catalogue import Record, Tensor


def token_mean_weights(mask: Tensor, tokens: float) -> Tensor:
    """Give every trainable token of the step the same weight: the loss of DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 8.
    """
    return mask.float() / max(tokens, 1.0)


def sequence_mean_weights(mask: Tensor, sequences: float) -> Tensor:
    """Give every sequence the same weight, shared by its tokens: GRPO, Shao et al. 2024
    (arXiv:2402.03300), equation 3.
    """
    tokens = mask.float().sum(dim=1, keepdim=True).clamp(min=1.0)
    return mask.float() / tokens / max(sequences, 1.0)


def sequence_sum_weights(mask: Tensor, sequences: float) -> Tensor:
    """Return weights for the mean over sequences of the sum over their tokens, without any division
    by length.

    This is the gradient of the likelihood of whole sequences, as in RLOO (arXiv:2402.14740).
    """
    return mask.float() / max(sequences, 1.0)


def fixed_length_weights(mask: Tensor, sequences: float, longest: int) -> Tensor:
    """Divide `sequence_sum_weights` by the length of the longest possible answer, in tokens.

    Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783): a constant in place of the answer's length, which
    favours long ones among bad answers.
    """
    return sequence_sum_weights(mask, sequences) / longest


def weights(mask: Tensor, aggregation: str, tokens: float, sequences: float, longest: int) -> Tensor:
    """Return weights [B, T] float32 of the aggregation with this name in `AGGREGATIONS`; arguments
    as in the others.
    """
    counts = {"tokens": tokens, "sequences": sequences, "longest": longest}
    return AGGREGATIONS[aggregation](counts, mask=mask)


AGGREGATIONS = {
    "token_mean": Record(token_mean_weights, "each token weighs the same (DAPO)"),
    "sequence_mean": Record(
        sequence_mean_weights, "each answer weighs the same, by the mean over its tokens (GRPO)"
    ),
    "sequence_sum": Record(
        sequence_sum_weights, "each answer weighs the same, by the sum over its tokens (RLOO)"
    ),
    "fixed_length": Record(
        fixed_length_weights, "as sequence_sum, divided by the longest possible answer (Dr. GRPO)"
    ),
}
"""The aggregations that a recipe can choose by name."""
