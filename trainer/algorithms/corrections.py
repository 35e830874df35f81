"""The engine and the trainer do not compute the same probabilities: how far apart they are, and what to do about it."""

import torch
from torch import Tensor

from trainer.algorithms.losses import MAX_LOG_RATIO


def truncated_importance_weights(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(exp(old - engine), cap) for each token: corrects the gradient for samples drawn by another distribution.

    Truncated importance sampling: Espeholt et al. 2018 (IMPALA, arXiv:1802.01561, the rho of equation 1); between
    engine and trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".

    Args:
        old_logprobs: [B, T], the trainer's own, before the step's first update.
        engine_logprobs: [B, T], the engine's under its sampling distribution.
        cap: upper bound, > 0.

    Returns:
        [B, T] without gradient.
    """
    difference = (old_logprobs - engine_logprobs).detach().clamp(max=MAX_LOG_RATIO)
    return torch.exp(difference).clamp(max=cap)


def gap_metrics(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, clip_low: float, clip_high: float
) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's on the tokens the engine sampled.

    Args:
        trainer_logprobs, engine_logprobs: [N], trainable tokens only, of as many ranks as the figures are to cover.
        clip_low, clip_high: the loss's clip band; a token outside it is clipped before any training took place.

    Returns:
        absolute difference in nats, as gap/mean, gap/p95 (nearest rank) and gap/max; gap/outside_clip is a share of
        tokens. All 0 without tokens.
    """
    if trainer_logprobs.numel() == 0:
        return {"gap/mean": 0.0, "gap/p95": 0.0, "gap/max": 0.0, "gap/outside_clip": 0.0}
    difference = trainer_logprobs.double() - engine_logprobs.double()
    distance = difference.abs().sort().values
    ratio = torch.exp(difference)
    outside = (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
    p95 = distance[max(0, -(-95 * len(distance) // 100) - 1)]
    figures = torch.stack([distance.mean(), p95, distance[-1], outside.double().mean()]).tolist()
    return dict(zip(("gap/mean", "gap/p95", "gap/max", "gap/outside_clip"), figures, strict=True))
