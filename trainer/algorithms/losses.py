"""Policy-gradient losses, one number a token. How tokens are averaged is `aggregation`'s business.

Each returns the loss [B, T] and a mask [B, T] bool of the tokens on which its bounds took effect.
"""

import torch
from torch import Tensor


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; different bounds below and above: DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 8; with geometric ratios: GSPO (arXiv:2507.18071), equation 5. With `dual_clip` = c and
    A < 0, max(the same min, c A): Ye et al. 2020 (arXiv:1912.09729), without which the loss of a token that
    has become much more likely is unbounded.

    Args:
        log_ratio: [B, T], see `ratios.log_ratio`; carries the gradient.
        advantages: [B] or [B, T]; treated as constant.
        clip_low, clip_high: distances from 1, both >= 0.
        dual_clip: a ratio above 1 + clip_high, such as 3 or 10.

    Returns:
        loss [B, T] (its gradient is 0 where clipped) and the mask [B, T] bool of tokens on which clipping took effect.
    """
    advantages = _per_token(advantages)
    ratio = torch.exp(log_ratio)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    clipped = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
        clipped = clipped | ((ratio > dual_clip) & (advantages < 0))
    return -surrogate, clipped


def cispo(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p: the weight is clipped, and no token loses its gradient.

    CISPO, MiniMax 2025 (arXiv:2506.13585), equations 4 and 5. The paper bounds ratios above only: clip_low = 1.

    Args:
        log_ratio: [B, T]; treated as constant.
        logprobs: [B, T]; carries the gradient.
        advantages: [B] or [B, T]; treated as constant.
        clip_low, clip_high: distances from 1, both >= 0. Common upper bounds of r are 5 and more: clip_high = 4.

    Returns:
        loss [B, T] and the mask [B, T] bool of tokens whose weight was bounded.
    """
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * _per_token(advantages) * logprobs, weight != ratio


def sapo(
    log_ratio: Tensor, advantages: Tensor, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """-(4 / t) sigmoid(t (r - 1)) A: a smooth gate in place of clipping, of slope 1 at r = 1 and flat far from it.

    SAPO, Gao et al. 2025 (arXiv:2511.20347).

    Args:
        log_ratio: [B, T]; carries the gradient.
        advantages: [B] or [B, T]; treated as constant.
        temperature_positive, temperature_negative: t where A > 0, and elsewhere; the higher, the sooner it is flat.

    Returns:
        loss [B, T] and a mask that is False throughout, since nothing is cut off.
    """
    advantages = _per_token(advantages)
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(temperature * (torch.exp(log_ratio) - 1.0)) * 4.0 / temperature
    return -gate * advantages, torch.zeros_like(log_ratio, dtype=torch.bool)


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-A log p: the policy gradient itself, for samples of the policy as it is, one update a step.

    REINFORCE, Williams 1992 (doi:10.1007/BF00992696).

    Args:
        logprobs: [B, T]; carries the gradient.
        advantages: [B] or [B, T]; treated as constant.

    Returns:
        loss [B, T] and a mask that is False throughout.
    """
    return -_per_token(advantages) * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def _per_token(advantages: Tensor) -> Tensor:
    """[B, 1] or [B, T], without gradient."""
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).detach()
