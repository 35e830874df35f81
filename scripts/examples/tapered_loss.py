"""A custom loss, as `loss: scripts/examples/tapered_loss.py:tapered` in the section `algorithm` of a recipe.

The names of its parameters decide their values: log_ratio, logprobs, old_logprobs, advantages and mask, all [B, T], or
keys of that section.
"""

import torch
from torch import Tensor


def tapered(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss -w A log p, in which bad answers count less as the policy moves away from them.

    TOPR, Le Roux et al. 2025 (arXiv:2503.14286): w is 1 where A >= 0, and otherwise the ratio of policy to old policy,
    at most 1. In the paper, the ratio is that of a complete answer (`ratio_level: sequence`).

    Returns:
        The loss [B, T], and a bool mask [B, T] of the tokens whose weight was bounded.
    """
    ratio, bad = log_ratio.detach().exp(), advantages < 0
    return -torch.where(bad, ratio.clamp(max=1.0), 1.0) * advantages * logprobs, bad & (ratio > 1.0)
