"""The value model's loss, for PPO."""

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2 for each token.

    PPO's reference implementation, as described by Engstrom et al. 2020 (arXiv:2005.12729), section 3.

    Args:
        values: [B, T]; carries the gradient.
        old_values: [B, T], before the step's first update; treated as constant.
        returns: [B, T], what the values should have been (see `returns.gae`); treated as constant.
        clip: how far a value may move from its old one in a step, in the reward's unit; None: the plain square.

    Returns:
        loss [B, T], to be summed with weights like any other, and the mask [B, T] bool of tokens on which clipping took
        effect, which have no gradient.
    """
    old_values, returns = old_values.detach(), returns.detach()
    loss = (values - returns).square()
    if clip is None:
        return 0.5 * loss, torch.zeros_like(values, dtype=torch.bool)
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded > loss
