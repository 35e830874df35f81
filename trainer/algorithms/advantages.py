"""Advantages: how much better a sample was than what the policy usually says to the same prompt.

Groups of unequal size are given one at a time, as [1, G].
"""

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
    return torch.where(informative(rewards).unsqueeze(1), centred, torch.zeros_like(centred))


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the group's *other* rewards: a baseline that does not depend on the sample itself.

    RLOO, Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free!"); Ahmadian et al. 2024
    (arXiv:2402.14740). It is G / (G - 1) times the reward less the group's mean. Exactly 0 where all
    rewards are equal, which includes a group of one: nobody to compare with.

    Args:
        rewards: [P, G].

    Returns:
        [P, G] float32.
    """
    size = rewards.shape[1]
    return group_relative(rewards, normalize_std=False) * (size / max(size - 1, 1))


def max_rl(rewards: Tensor) -> Tensor:
    """(reward - mean) / mean of the group: an estimate of the gradient of log(probability of success).

    MaxRL, Tajwar et al. 2026 (arXiv:2602.02710), theorem 2 and its control variate: with rewards of 0 and 1 it averages
    over the successes alone, so a prompt counts the more the rarer its successes are. A group without any, or with
    nothing else, gets exactly 0.

    Args:
        rewards: [P, G], none negative.

    Returns:
        [P, G] float32, at least -1.
    """
    if rewards.numel() and rewards.min() < 0:
        raise ValueError(f"max_rl divides by the mean reward and needs rewards of at least 0, not {rewards.min():g}")
    mean = rewards.float().mean(dim=1, keepdim=True)
    centred = group_relative(rewards, normalize_std=False)
    return torch.where(mean > 0, centred / mean, torch.zeros_like(centred))


def normalize_then_sum(rewards: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Several rewards, each made relative to its group by itself, then added: none drowns in another's scale.

    GDPO, Liu et al. 2026 (arXiv:2601.05242); the normalisation over the whole step which follows there is `whiten`.

    Args:
        rewards: [R, P, G] of R reward functions.
        weights: [R].
        epsilon: added to each standard deviation.

    Returns:
        [P, G] float32.
    """
    return torch.stack([w * group_relative(r, True, epsilon) for r, w in zip(rewards, weights, strict=True)]).sum(dim=0)


def moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Count, sum and sum of squares: add them up over micro-batches and ranks, then `whiten`.

    Args:
        values: of any shape.
        mask: of the same shape; None: all of them count.

    Returns:
        [3] float64: the difference of two sums of squares would be lost in float32.
    """
    counted = values.detach().double().flatten() if mask is None else values.detach()[mask.bool()].double()
    count = torch.tensor(float(counted.numel()), dtype=torch.float64, device=values.device)
    return torch.stack([count, counted.sum(), counted.square().sum()])


def whiten(values: Tensor, mask: Tensor, total: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Values less their mean over the whole step, divided by their standard deviation (population's) + epsilon.

    The global normalisation of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262): of every token's reward-to-go, or, in
    its baseline variant, of `group_relative(..., normalize_std=False)`; also PPO's of its advantages.

    Args:
        values: of any shape.
        mask: of the same shape.
        total: [3] float64, the sum of `moments` over everything the step trains on, all ranks.

    Returns:
        the values' shape, float32; 0 where masked, and everywhere if all values of the step are equal.
    """
    count, mean, square = total[0], total[1] / total[0].clamp(min=1), total[2] / total[0].clamp(min=1)
    variance = square - mean.square()
    if count == 0 or variance <= 1e-13 * square:  # what equal values leave by rounding, not a spread
        return torch.zeros_like(values, dtype=torch.float32)
    white = (values.detach().double() - mean) / (variance.sqrt() + epsilon)
    return torch.where(mask.bool(), white, 0.0).float()


def informative(rewards: Tensor) -> Tensor:
    """[P] bool: groups whose rewards [P, G] are not all equal. The others have no advantages (DAPO, equation 11)."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)
