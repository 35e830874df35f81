"""Advantages: how much better an answer is than the policy's usual answers to its prompt.
`ADVANTAGES` lists them.

Rewards are [P, G] of any floating dtype, masks [B, T], and results float32, 0 where masked. Groups
of unequal size are passed one at a time, as [1, G]. A turn is a run of trainable tokens; between
two turns are masked tokens, those of a tool's reply or at least of the template. The return of a
turn or token sums the rewards from there on.
"""

from __future__ import annotations

from trainer.algorithms.catalogue import Advantage, Tensor, torch
from trainer.algorithms.kl import k1

EPSILON = 1e-6


def group_relative(rewards: Tensor, normalize_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """Return each reward minus the group's mean, divided by the group's standard deviation if
    `normalize_std`.

    With the division: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without: Dr. GRPO,
    Liu et al. 2025 (arXiv:2503.20783), which shows that the division weighs prompts by their
    difficulty. The standard deviation is the population's (divisor G), so that a group of one is
    defined; a group whose rewards are all equal gets exactly 0, whatever the rounding of its mean.
    Returns [P, G]; the divisor is standard deviation + epsilon.
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_std:
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=0) + epsilon)
    return torch.where(informative(rewards).unsqueeze(1), centred, torch.zeros_like(centred))


def centred(rewards: Tensor) -> Tensor:
    """Return `group_relative` without the division: REINFORCE++'s baseline divides by the step's
    spread instead (`whiten`).
    """
    return group_relative(rewards, normalize_std=False)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return each reward minus the mean of the group's *other* rewards: a baseline that does not
    depend on the sample itself.

    RLOO, Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free!"); Ahmadian et al.
    2024 (arXiv:2402.14740). It is G / (G - 1) times the reward minus the group's mean, and exactly
    0 where all rewards are equal, which includes a group of one.
    """
    size = rewards.shape[1]
    return group_relative(rewards, normalize_std=False) * (size / max(size - 1, 1))


def max_rl(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / mean of the group: an estimate of the gradient of log(probability of
    success).

    MaxRL, Tajwar et al. 2026 (arXiv:2602.02710), theorem 2 and its control variate. With rewards of
    0 and 1, the gradient is averaged over the successes alone, so a prompt counts more the rarer
    its successes are. A group that has no successes, or only successes, gets exactly 0. Raises
    ValueError for a negative reward. Returns [P, G], at least -1.
    """
    if rewards.numel() and rewards.min() < 0:
        raise ValueError(
            f"max_rl divides by the mean reward and needs rewards of at least 0, not {rewards.min():g}"
        )
    mean = rewards.float().mean(dim=1, keepdim=True)
    centred = group_relative(rewards, normalize_std=False)
    return torch.where(mean > 0, centred / mean, torch.zeros_like(centred))


def normalize_then_sum(rewards: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Normalise each of several rewards within its group, then add them, so that their scales do
    not matter.

    GDPO, Liu et al. 2026 (arXiv:2601.05242), which then normalises over the whole step (`whiten`).
    Rewards [R, P, G] of R functions and their weights [R] give [P, G]; epsilon is added to each
    standard deviation. NaN stands for a function that abstained from an answer: it adds nothing
    there, and has no part in mean and deviation.
    """
    relative = torch.zeros(rewards.shape, device=rewards.device)
    for values, result in zip(rewards.flatten(0, 1), relative.flatten(0, 1), strict=True):
        judged = ~values.isnan()
        if judged.any():
            result[judged] = group_relative(values[judged].unsqueeze(0), True, epsilon)[0]
    return (weights.view(-1, 1, 1) * relative).sum(dim=0)


def moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return count, sum and sum of squares of values, to be added up over micro-batches and ranks
    for `whiten`.

    Values and mask have the same shape, with any number of dimensions; without a mask all values
    count. Returns [3] float64, since in float32 the difference of two sums of squares would be
    lost.
    """
    counted = (
        values.detach().double().flatten() if mask is None else values.detach()[mask.bool()].double()
    )
    count = torch.tensor(float(counted.numel()), dtype=torch.float64, device=values.device)
    return torch.stack([count, counted.sum(), counted.square().sum()])


def whiten(values: Tensor, mask: Tensor, total: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return values minus their mean over the whole step, divided by their standard deviation +
    epsilon.

    This is the global normalisation of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262), which
    applies it to every token's reward-to-go or, in its baseline variant, to `group_relative(...,
    normalize_std=False)`. PPO applies it to its advantages. Values and mask have the same shape,
    with any number of dimensions; `total` [3] float64 is the sum of `moments` over all values of
    the step, on all ranks. The standard deviation is the population's (divisor: the count). The
    result is 0 everywhere if all values are equal.
    """
    count = total[0]
    mean = total[1] / total[0].clamp(min=1)
    square = total[2] / total[0].clamp(min=1)
    variance = square - mean.square()
    if count == 0 or variance <= 1e-13 * square:  # all values are equal, up to rounding
        return torch.zeros_like(values, dtype=torch.float32)
    white = (values.detach().double() - mean) / (variance.sqrt() + epsilon)
    return torch.where(mask.bool(), white, 0.0).float()


def informative(rewards: Tensor) -> Tensor:
    """Mark the groups whose rewards [P, G] are not all equal, [P] bool. In the other groups every
    advantage is 0.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11.
    """
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def at_turn_ends(rewards: Tensor, mask: Tensor) -> Tensor:
    """Put each turn's reward on the turn's last token.

    Rewards are [B, K] in the order of turns; columns beyond a sequence's number of turns are
    ignored. Returns [B, T].
    """
    spread = spread_over_turns(rewards, mask)
    following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return torch.where(mask.bool() & ~following.bool(), spread, 0.0)


def at_sequence_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """Put rewards [B] of outcomes on each sequence's last trainable token, if it has one. Return
    [B, T].
    """
    remaining = mask.flip(1).cumsum(dim=1).flip(1)  # trainable tokens from here on
    return torch.where(mask.bool() & (remaining == 1), rewards.float().unsqueeze(1), 0.0)


def spread_over_turns(values: Tensor, mask: Tensor) -> Tensor:
    """Put each turn's value on every token of the turn.

    Values are [B, K] in the order of turns, where K is at least the number of turns of any
    sequence. Returns [B, T].
    """
    trained = mask.bool()
    before = torch.nn.functional.pad(trained[:, :-1], (1, 0))
    turn = (trained & ~before).long().cumsum(dim=1) - 1
    if turn.numel() and turn.max() >= values.shape[1]:
        raise ValueError(
            f"a sequence has {int(turn.max()) + 1} turns, but there are values for {values.shape[1]} "
            "only"
        )
    return torch.where(trained, values.float().gather(1, turn.clamp(min=0)), 0.0)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of rewards from each position to the end, of tokens [B, T] or of
    turns [B, K].

    R_t = r_t + gamma * R_(next unmasked position): masked positions neither carry rewards nor
    discount them, so the length of a tool's reply does not change what the outcome contributes to
    an earlier turn. Sutton and Barto 2018, Reinforcement Learning: An Introduction, equation 3.8.
    REINFORCE++'s token-level return (arXiv:2501.03262) is this with gamma 1, applied to the
    outcome's reward (`at_sequence_end`) plus the KL `penalty`. The result has the shape of the
    rewards; gamma is in 0..1.
    """
    trained = mask.bool()
    total = _accumulate(torch.where(trained, rewards.float(), 0.0), torch.where(trained, gamma, 1.0))
    return torch.where(trained, total, 0.0)


def turn_relative(
    returns: Tensor, taken: Tensor, normalize_std: bool = True, epsilon: float = EPSILON
) -> Tensor:
    """Return a turn's return relative to the returns of the same turn in the group's other samples.

    MT-GRPO, Zeng et al. 2025 (arXiv:2505.11821), for any number of turns. The mean and the standard
    deviation (the population's) are over the samples that reach this turn; where their returns are
    all equal, or there is only one, the result is exactly 0. `returns` [P, G, K] are those of
    `returns_to_go`; `taken` [P, G, K] is 1 where the sample has this turn. The result [P, G, K] is
    put on tokens by `spread_over_turns`.
    """
    present = taken.bool()
    values = returns.float()
    count = present.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(present, values, 0.0).sum(dim=1, keepdim=True) / count
    centred = torch.where(present, values - mean, 0.0)
    if normalize_std:
        centred = centred / ((centred.square().sum(dim=1, keepdim=True) / count).sqrt() + epsilon)
    highest = torch.where(present, values, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(present, values, torch.inf).amin(dim=1, keepdim=True)
    return torch.where(present & (highest > lowest), centred, 0.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages over the trainable tokens, as if masked ones were not there.

    A_t = d_t + gamma * gae_lambda * A_next with the TD error d_t = r_t + gamma * V_next - V_t:
    Schulman et al. 2015 (arXiv:1506.02438), equations 11, 12 and 16. After the last trainable token
    A and V are 0, also of a truncated answer. Rewards [B, T] are on trainable tokens. Values [B, T]
    are treated as constant; the one at t is the value of the state in which token t was sampled.
    Returns the advantages, not whitened, and the returns (advantages + values), which are the
    critic's targets, both [B, T].
    """
    trained = mask.bool()
    values = torch.where(trained, values.detach().float(), 0.0)
    # At t, the value of the first trainable token from t on.
    next_values = _accumulate(values, torch.where(trained, 0.0, 1.0))
    following = torch.nn.functional.pad(next_values[:, 1:], (0, 1))
    td_errors = torch.where(trained, rewards.float() + gamma * following - values, 0.0)
    advantages = _accumulate(td_errors, torch.where(trained, gamma * gae_lambda, 1.0))
    advantages = torch.where(trained, advantages, 0.0)
    return advantages, advantages + values


def teacher_relative(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the teacher's log-probability of a token minus the policy's: the negative of `kl.k1`,
    which estimates the reverse KL from the teacher.

    On-policy distillation: Agarwal et al. 2023 (arXiv:2306.13649); as an undiscounted advantage: Lu
    et al. 2025, "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation). Returns
    [B, T] in nats.
    """
    return torch.where(mask.bool(), -k1(old_logprobs, teacher_logprobs), 0.0)


def _accumulate(values: Tensor, decay: Tensor) -> Tensor:
    """Compute out[t] = values[t] + decay[t] * out[t + 1] for [B, T], in log2(T) steps over whole
    tensors.

    Each round doubles the number of positions that values[t] sums over. decay[t] becomes the
    product of the decays of these positions.
    """
    reach = 1
    while reach < values.shape[1]:
        values = values + decay * torch.nn.functional.pad(values[:, reach:], (0, reach))
        decay = decay * torch.nn.functional.pad(decay[:, reach:], (0, reach))
        reach *= 2
    return values


ADVANTAGES = {
    "group": Advantage(
        group_relative,
        "rewards minus the group's mean, over its standard deviation (GRPO)",
        turns=True,
        sums=True,
    ),
    "leave_one_out": Advantage(
        leave_one_out, "rewards minus the mean of the group's other answers (RLOO)"
    ),
    "max_rl": Advantage(
        max_rl, "rewards minus the group's mean, over that mean (MaxRL)", nonnegative=True
    ),
    "reinforce_pp": Advantage(
        returns_to_go, "returns of tokens, whitened over the step (REINFORCE++)", whitened=True
    ),
    "reinforce_pp_baseline": Advantage(
        centred,
        "rewards minus the group's mean, over the step's deviation",
        whitened=True,
        turns=True,
        sums=True,
    ),
    "gae": Advantage(gae, "returns of tokens relative to a critic's values (PPO)", whitened=True),
    "distill": Advantage(
        teacher_relative, "no rewards: a teacher's log-probability of a token minus the policy's"
    ),
}
"""The advantages that a recipe can choose by name."""
