"""An advantage for every token of a step, from rewards and, where the recipe says so, KL and a critic's values."""

import numpy as np
import torch
from torch import Tensor

from sharding.ranks import all_reduce_sum, rank, send_to_all
from trainer.algorithms import advantages, kl
from trainer.config.schema import AlgorithmConfig, TrainConfig
from trainer.learning.groups import (
    Group,
    MiniBatch,
    overlong_penalty,
    own_rows,
    own_turns,
    reward_components,
    shaped_rewards,
    turn_rewards,
)
from trainer.types import MicroBatch

_BY_TOKEN = ("reinforce_pp", "gae")
_WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")


def assign_credit(minibatches: list[MiniBatch], config: TrainConfig, reward_weights: dict[str, float]) -> None:
    """Fill in the micro-batches' advantages and, for a critic, returns. Collective where models have a say.

    Needs their `old_logprobs` and `ref_logprobs` where KL is in the reward or the reference is a teacher, and
    `old_values` where there is a critic.

    Args:
        reward_weights: of the reward functions, by label.
    """
    for minibatch in minibatches:
        if config.algorithm.advantage == "distill":
            _credit_likeness(minibatch.batches)
        elif config.algorithm.advantage in _BY_TOKEN:
            _credit_tokens(minibatch, config)
        else:
            _credit_groups(minibatch, config, reward_weights)
    if config.algorithm.advantage in _WHITENED:
        _whiten([batch for minibatch in minibatches for batch in minibatch.batches])


def has_signal(minibatches: list[MiniBatch]) -> bool:
    """Whether any trainable token of any rank has an advantage other than 0. Collective."""
    found = any(b.trained(b.advantages).any() for minibatch in minibatches for b in minibatch.batches)
    return all_reduce_sum({"signal": float(found)})["signal"] > 0


def _credit_tokens(minibatch: MiniBatch, config: TrainConfig) -> None:
    """Rewards on the tokens that end a turn or the episode, KL on every token; then what they add up to.

    Each trajectory of an episode ends with what the episode was given from there on.
    """
    algorithm = config.algorithm
    turns = algorithm.credit == "turns"
    tables = []
    for group in minibatch.groups:
        totals = shaped_rewards(group, config)
        given = turn_rewards(group, totals)[0] if turns else totals.unsqueeze(1)
        tables.append(own_turns(group, given, later=True) if turns else _for_trajectories(group, given))
    table = _stacked(tables)
    for batch in minibatch.batches:
        own, mask = own_rows(table, batch), batch.loss_mask
        rewards = advantages.at_turn_ends(own, mask) if turns else advantages.at_sequence_end(own[:, 0], mask)
        rewards = rewards + _kl_penalty(batch, algorithm)
        if algorithm.advantage == "gae":
            assert batch.old_values is not None
            batch.advantages, batch.returns = advantages.gae(
                rewards, batch.old_values, mask, algorithm.discount, algorithm.trace
            )
        else:
            batch.advantages = advantages.returns_to_go(rewards, mask, algorithm.discount)


def _credit_likeness(batches: list[MicroBatch]) -> None:
    """How much likelier the teacher finds a token than the policy does: less each token's share of reverse KL.

    On-policy distillation: Agarwal et al. 2023 (arXiv:2306.13649); as an advantage without a discount: Lu et al. 2025,
    "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation).
    """
    for batch in batches:
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        likelier = -kl.k1(batch.old_logprobs, batch.ref_logprobs)
        batch.advantages = torch.where(batch.loss_mask.bool(), likelier, 0.0)


def _credit_groups(minibatch: MiniBatch, config: TrainConfig, reward_weights: dict[str, float]) -> None:
    """Each episode against its group, the same on all its tokens, or on all of a turn."""
    turns = config.algorithm.credit == "turns"
    penalties = _kl_penalties(minibatch, config.algorithm).split([len(group) for group in minibatch.groups])
    table = _stacked(
        [
            own_turns(group, _turn_advantages(group, config))
            if turns
            else _for_trajectories(group, _outcome_advantages(group, penalty, config, reward_weights))
            for group, penalty in zip(minibatch.groups, penalties, strict=True)
        ]
    )
    for batch in minibatch.batches:
        own, mask = own_rows(table, batch), batch.loss_mask
        batch.advantages = advantages.spread_over_turns(own, mask) if turns else own.expand_as(mask)


def _outcome_advantages(
    group: Group, penalties: Tensor, config: TrainConfig, reward_weights: dict[str, float]
) -> Tensor:
    """[G, 1] float32. `penalties` [G] are added to the rewards.

    Where rewards are made relative one by one, the penalty of long answers is added to the result, less its mean: it is
    in parts of a reward's standard deviation then, and a token over the margin costs as little as it should. As a
    reward of its own it would be blown up to the size of the others, however small it is.
    """
    algorithm = config.algorithm
    if algorithm.combine_rewards == "normalize_then_sum":
        rewards, weights = reward_components(group, reward_weights, config.reward.error_reward)
        relative = advantages.normalize_then_sum(rewards.unsqueeze(1), weights)
        lengths = advantages.group_relative(overlong_penalty(group, config).unsqueeze(0), normalize_std=False)
        return (relative + lengths).T
    rewards = (shaped_rewards(group, config) + penalties).unsqueeze(0)
    if algorithm.advantage == "leave_one_out":
        return advantages.leave_one_out(rewards).T
    if algorithm.advantage == "max_rl":
        return advantages.max_rl(rewards).T
    return advantages.group_relative(rewards, _by_std(algorithm)).T


def _turn_advantages(group: Group, config: TrainConfig) -> Tensor:
    """[G, K] float32, from what each turn and those after it were given, against the same turn of other episodes.

    An episode's turns are those of its trajectories, end to end: its third is compared with everybody's third,
    whichever conversation it is in, because what counts is how much of the episode is still to come.
    """
    rewards, taken = turn_rewards(group, shaped_rewards(group, config))
    to_go = advantages.returns_to_go(rewards, taken, config.algorithm.discount)
    return advantages.turn_relative(to_go.unsqueeze(0), taken.unsqueeze(0), _by_std(config.algorithm))[0]


def _by_std(algorithm: AlgorithmConfig) -> bool:
    """REINFORCE++'s baseline has the step's standard deviation, not the group's."""
    return algorithm.normalize_std and algorithm.advantage == "group"


def _kl_penalty(batch: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    """What each token's reward loses to KL, [B, T-1]; zeros where KL is not in the reward."""
    if algorithm.kl_coef == 0 or algorithm.kl_in == "loss":
        return torch.zeros_like(batch.loss_mask)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    estimate = kl.divergence("k1", batch.old_logprobs, batch.old_logprobs, batch.ref_logprobs, algorithm.kl_clamp)
    return kl.penalty(estimate, batch.loss_mask, algorithm.kl_coef)


def _kl_penalties(minibatch: MiniBatch, algorithm: AlgorithmConfig) -> Tensor:
    """What each episode's reward loses to KL, [E] over all ranks. Collective where KL is in the reward."""
    sizes = [len(episode) for group in minibatch.groups for episode in group]
    if algorithm.kl_coef == 0 or algorithm.kl_in == "loss":
        return torch.zeros(len(sizes))
    mine = torch.zeros(sum(sizes))
    for batch in minibatch.batches:
        if batch.rows:
            mine[batch.rows] = _kl_penalty(batch, algorithm).sum(dim=1).float().cpu()
    own = mine[minibatch.shares[rank()]].numpy().tobytes()
    penalties = torch.empty_like(mine)
    for share, part in zip(minibatch.shares, send_to_all(own), strict=True):
        penalties[share] = torch.tensor(np.frombuffer(part, dtype=np.float32))
    return torch.stack([part.sum() for part in penalties.split(sizes)])


def _whiten(batches: list[MicroBatch]) -> None:
    """Advantages relative to the mean and spread of the whole step's. Collective."""
    total = sum((advantages.moments(b.advantages, b.loss_mask).cpu() for b in batches), torch.zeros(3).double())
    names = ("count", "sum", "squares")
    summed = torch.tensor(
        list(all_reduce_sum(dict(zip(names, total.tolist(), strict=True))).values()), dtype=torch.float64
    )
    for batch in batches:
        batch.advantages = advantages.whiten(batch.advantages, batch.loss_mask, summed.to(batch.advantages.device))


def _for_trajectories(group: Group, table: Tensor) -> Tensor:
    """From a table [G, K] of episodes the rows [N, K] of their trajectories, which are those of their episode."""
    return table.repeat_interleave(torch.tensor([len(episode) for episode in group]), dim=0)


def _stacked(tables: list[Tensor]) -> Tensor:
    """Tables [G, K] of several groups on top of each other, as wide as the widest, filled up with zeros."""
    width = max((table.shape[1] for table in tables), default=1)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
