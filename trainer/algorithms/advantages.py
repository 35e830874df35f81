"""Advantages: how much better a sample was than what the policy usually says to the same prompt."""

import torch
from torch import Tensor

EPSILON = 1e-6


def group_relative(rewards: Tensor, normalize_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """Reward minus the group's mean, divided by the group's standard deviation where `normalize_std`.

    With the division: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without: Dr. GRPO, Liu et al. 2025
    (arXiv:2503.20783), which shows that the division weighs prompts by their difficulty. The standard deviation is the
    population's (divisor G), so that a group of one is defined; a group whose rewards are all equal says nothing and
    gets exactly 0, whatever the rounding of its mean.

    Args:
        rewards: [P, G], any floating dtype.
        normalize_std: divide by (standard deviation + epsilon).

    Returns:
        [P, G] float32.
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_std:
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=0) + epsilon)
    informative = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return torch.where(informative, centred, torch.zeros_like(centred))
