"""What length does to rewards, and to which answers are learned from at all."""

from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, longest: int, margin: int) -> Tensor:
    """0 up to longest - margin tokens, then falling in a straight line to -1 at `longest`, and -1 beyond.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13; there, 4096 of 20480 tokens are the margin.

    Args:
        lengths: [N], tokens the policy sampled.
        longest: tokens, usually sampling.max_tokens.
        margin: tokens, 0..longest; 0: a step.

    Returns:
        [N] float32, to be added to the reward.
    """
    excess = lengths.float() - (longest - margin)
    if margin == 0:
        return -(excess > 0).float()
    return -(excess / margin).clamp(0.0, 1.0)


def finished_only(mask: Tensor, truncated: Tensor) -> Tensor:
    """Overlong filtering: a cut-off answer is not learned from, since nobody knows how it would have ended.

    DAPO (arXiv:2503.14476), section 3.4. Its reward still counts for the group's mean. To be done before the mask is
    counted, so that the rest of the step weighs more.

    Args:
        mask: [B, T].
        truncated: [B] bool, finish_reason "length".

    Returns:
        [B, T], the mask's dtype.
    """
    return mask * ~truncated.bool().unsqueeze(1)


def length_normalized(rewards: Tensor, lengths: Tensor, strength: float) -> Tensor:
    """reward / (1 + strength * length / the group's mean length): of two good answers the shorter is better.

    Multiplicative, so that a wrong answer of reward 0 gains nothing by being short: GR3, Li et al. 2026
    (arXiv:2603.10535). A negative reward would be worth less the longer it is, which is the wrong way round.

    Args:
        rewards: [P, G], none negative.
        lengths: [P, G], tokens the policy sampled.
        strength: alpha, >= 0; 0 changes nothing.

    Returns:
        [P, G] float32.
    """
    if rewards.numel() and rewards.min() < 0:
        raise ValueError(f"rewards to be normalised by length must be at least 0, not {rewards.min():g}")
    relative = lengths.float() / lengths.float().mean(dim=1, keepdim=True).clamp(min=1.0)
    return rewards.float() / (1.0 + strength * relative)
