"""A loss of one's own, as `loss: scripts/examples/tapered_loss.py:tapered` in the section `algorithm` of a recipe.

Its parameters are named for what they are given: log_ratio, logprobs, old_logprobs, advantages and mask, all [B, T],
and keys of that section.
"""

import torch
from torch import Tensor


def tapered(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-w A log p: good answers count in full, bad ones the less the further the policy has moved away from them.

    TOPR, Le Roux et al. 2025 (arXiv:2503.14286): w is 1 where A >= 0, and else the ratio of policy to old policy, but
    at most 1. There the ratio is that of a whole answer (`ratio_level: sequence`).

    Returns:
        loss [B, T] and the mask [B, T] bool of tokens whose weight was bounded.
    """
    ratio, bad = log_ratio.detach().exp(), advantages < 0
    return -torch.where(bad, ratio.clamp(max=1.0), 1.0) * advantages * logprobs, bad & (ratio > 1.0)
