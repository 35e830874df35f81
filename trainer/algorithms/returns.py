"""Rewards of turns and tokens, and what they add up to from each token on, past whatever tools said in between.

A turn is a run of trainable tokens; masked tokens lie between two of them (at least the template's).
"""

import torch
from torch import Tensor


def at_turn_ends(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each turn's reward on the turn's last token.

    Args:
        rewards: [B, K], in the order of turns; columns beyond a sequence's own turns are not looked at.
        mask: [B, T].

    Returns:
        [B, T] float32, 0 elsewhere.
    """
    spread = spread_over_turns(rewards, mask)
    following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return torch.where(mask.bool() & ~following.bool(), spread, 0.0)


def at_sequence_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """An outcome's reward on the last trainable token; nowhere, where there is none.

    Args:
        rewards: [B].
        mask: [B, T].

    Returns:
        [B, T] float32, 0 elsewhere.
    """
    remaining = mask.flip(1).cumsum(dim=1).flip(1)  # trainable tokens from here on
    return torch.where(mask.bool() & (remaining == 1), rewards.float().unsqueeze(1), 0.0)


def spread_over_turns(values: Tensor, mask: Tensor) -> Tensor:
    """Each turn's value on every token of the turn.

    Args:
        values: [B, K], in the order of turns, K at least the number of turns of any sequence.
        mask: [B, T].

    Returns:
        [B, T] float32, 0 on masked tokens.
    """
    trained = mask.bool()
    before = torch.nn.functional.pad(trained[:, :-1], (1, 0))
    turn = (trained & ~before).long().cumsum(dim=1) - 1
    if turn.numel() and turn.max() >= values.shape[1]:
        raise ValueError(f"a sequence has {int(turn.max()) + 1} turns, but values for only {values.shape[1]} are given")
    return torch.where(trained, values.float().gather(1, turn.clamp(min=0)), 0.0)


def returns_to_go(rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """The discounted sum of rewards from here to the end: of tokens [B, T], or of turns [B, K].

    R_t = r_t + discount * R_(next unmasked position): masked positions neither carry rewards nor discount them, so an
    outcome is worth the same to an earlier turn however much the tool between them said. Sutton and Barto 2018,
    equation 3.8. REINFORCE++'s token-level return (arXiv:2501.03262) is this with discount 1 on the outcome's reward
    (`at_sequence_end`) plus the KL `penalty`.

    Args:
        rewards: [B, T].
        mask: [B, T].
        discount: in 0..1.

    Returns:
        [B, T] float32, 0 on masked positions.
    """
    trained = mask.bool()
    total = _accumulate(torch.where(trained, rewards.float(), 0.0), torch.where(trained, discount, 1.0))
    return torch.where(trained, total, 0.0)


def turn_relative(returns: Tensor, taken: Tensor, normalize_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A turn's return relative to those of the same turn in the group's other samples.

    MT-GRPO, Zeng et al. 2025 (arXiv:2505.11821), for any number of turns. Mean and (population's) standard deviation
    are over the samples that got to this turn; where they are all alike, a single one included, it is exactly 0.

    Args:
        returns: [P, G, K], see `returns_to_go`.
        taken: [P, G, K], 1 where the sample has this turn.
        normalize_std: divide by (standard deviation + epsilon).

    Returns:
        [P, G, K] float32, 0 for turns that were not taken; `spread_over_turns` puts it on tokens.
    """
    there, values = taken.bool(), returns.float()
    count = there.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(there, values, 0.0).sum(dim=1, keepdim=True) / count
    centred = torch.where(there, values - mean, 0.0)
    if normalize_std:
        centred = centred / ((centred.square().sum(dim=1, keepdim=True) / count).sqrt() + epsilon)
    highest = torch.where(there, values, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(there, values, torch.inf).amin(dim=1, keepdim=True)
    return torch.where(there & (highest > lowest), centred, 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, discount: float, trace: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trainable tokens, as if masked ones were not there.

    A_t = d_t + discount * trace * A_next with d_t = r_t + discount * V_next - V_t: Schulman et al. 2015
    (arXiv:1506.02438), equations 11, 12 and 16. After the last trainable token A and V are 0, a truncated answer's too.

    Args:
        rewards: [B, T], on trainable tokens.
        values: [B, T]: at t the value of the state in which token t was sampled; without gradient.
        mask: [B, T].
        discount, trace: gamma and lambda, in 0..1.

    Returns:
        advantages and returns (advantages + values, what the value model is to learn), [B, T] float32, 0 on masked
        tokens. Advantages are not whitened.
    """
    trained = mask.bool()
    values = torch.where(trained, values.detach().float(), 0.0)
    upcoming = _accumulate(values, torch.where(trained, 0.0, 1.0))  # the value of the first trainable token from t on
    following = torch.nn.functional.pad(upcoming[:, 1:], (0, 1))
    surprise = torch.where(trained, rewards.float() + discount * following - values, 0.0)
    advantages = _accumulate(surprise, torch.where(trained, discount * trace, 1.0))
    advantages = torch.where(trained, advantages, 0.0)
    return advantages, advantages + values


def _accumulate(values: Tensor, decay: Tensor) -> Tensor:
    """out[t] = values[t] + decay[t] * out[t + 1] for [B, T], in log2(T) steps over whole tensors.

    After each round out[t] sums over twice as many positions, and decay[t] leads as far ahead.
    """
    reach = 1
    while reach < values.shape[1]:
        values = values + decay * torch.nn.functional.pad(values[:, reach:], (0, reach))
        decay = decay * torch.nn.functional.pad(decay[:, reach:], (0, reach))
        reach *= 2
    return values
