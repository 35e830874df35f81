"""Importance ratios, of a token or of a whole sequence, and how far they may go."""

import torch
from torch import Tensor

from trainer.algorithms.names import Level

# exp(20) is 5e8: ratios beyond it carry no information, and without a bound exp() overflows to inf at 89, which turns
# a masked or clipped token into inf * 0 = nan.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level = "token") -> Tensor:
    """log(policy / old policy) for each token, or the same for all tokens of a sequence.

    - token: log p(y_t) - log p_old(y_t), as in PPO.
    - geometric: its mean over the sequence's trainable tokens, so that exp() is the geometric mean of their ratios:
      GSPO, Zheng et al. 2025 (arXiv:2507.18071), equation 7.
    - sequence: its sum, so that exp() is the ratio of the probabilities of the whole sequence, as in RLOO (Ahmadian et
      al. 2024, arXiv:2402.14740). It leaves any fixed band as sequences grow.

    With the latter two a token has the sequence's value and the gradient of its own log-probability (GSPO-token,
    equation 14). Averaged over the sequence for the geometric mean, or summed for the product, that is the gradient of
    the sequence's own ratio, while advantages and corrections can still differ from token to token, and a token that is
    weighted with 0 moves nothing.

    Args:
        logprobs: [B, T] under the policy being trained; carries the gradient.
        old_logprobs: [B, T] under the policy to compare with; treated as constant.
        mask: [B, T]; what the others hold where it is 0 does not matter.

    Returns:
        [B, T] within +-MAX_LOG_RATIO, 0 on masked tokens. Beyond the bound the gradient is 0.
    """
    trained = mask.bool()
    difference = torch.where(trained, logprobs - old_logprobs.detach(), 0.0)
    if level != "token":
        value = difference.detach().sum(dim=1, keepdim=True)
        if level == "geometric":
            value = value / trained.sum(dim=1, keepdim=True).clamp(min=1)
        difference = torch.where(trained, value + (difference - difference.detach()), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
