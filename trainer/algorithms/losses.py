"""Policy-gradient losses, one number a token. How tokens are averaged is `aggregation`'s business."""

import torch
from torch import Tensor

# exp(20) is 5e8: ratios beyond it carry no information, and without a bound exp() overflows to inf at 89, which turns
# a masked or clipped token into inf * 0 = nan.
MAX_LOG_RATIO = 20.0


def clipped_policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; different bounds below and above: DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 8.

    Args:
        logprobs: [B, T] under the policy being trained; carries the gradient.
        old_logprobs: [B, T] under the policy the step began with; treated as constant.
        advantages: [B] or [B, T]; treated as constant.
        clip_low, clip_high: distances from 1, both >= 0.

    Returns:
        loss [B, T] (its gradient is 0 where clipped) and the mask [B, T] bool of tokens on which clipping took effect.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    advantages = advantages.detach()
    ratio = torch.exp((logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    return loss, too_high | too_low
