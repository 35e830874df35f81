"""Advantages for every token of a step, from rewards and, if the recipe says so, KL and critic or
teacher outputs.
"""

import numpy as np
import torch
from torch import Tensor

from sharding.ranks import all_reduce_sum, rank, send_to_all
from trainer.algorithms import advantages, kl
from trainer.algorithms.catalogue import Advantage
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.schema import TrainConfig
from trainer.learning import groups
from trainer.learning.groups import (
    Group,
    MiniBatch,
    batch_rows,
    shaped_rewards,
    trajectory_turns,
    turn_rewards,
)
from trainer.types import MicroBatch


def assign_credit(
    minibatches: list[MiniBatch], config: TrainConfig, reward_weights: dict[str, float]
) -> None:
    """Set the micro-batches' advantages and, for a critic, returns. Collective if KL is in the
    reward or it whitens.

    The micro-batches need `old_logprobs` and `ref_logprobs` if KL is in the reward or the reference
    is a teacher, and `old_values` if there is a critic. `reward_weights` are the weights of the
    reward functions, by label.
    """
    advantage = config.algorithm.advantage_record
    for minibatch in minibatches:
        if advantage.by_token:
            _credit_tokens(minibatch, config, advantage)
        else:
            _credit_groups(minibatch, config, advantage, reward_weights)
    if advantage.whitened:
        _whiten([batch for minibatch in minibatches for batch in minibatch.batches])


def has_signal(minibatches: list[MiniBatch]) -> bool:
    """Return True if any trainable token of any rank has an advantage other than 0. Collective."""
    signal = any(b.trained(b.advantages).any() for minibatch in minibatches for b in minibatch.batches)
    return all_reduce_sum({"signal": float(signal)})["signal"] > 0


def _credit_tokens(minibatch: MiniBatch, config: TrainConfig, advantage: Advantage) -> None:
    """Set advantages of tokens, from rewards on the tokens that end a turn or the episode, minus KL
    on every token.

    The last token of a trajectory has the rewards that its episode gets from there on.
    """
    algorithm = config.algorithm
    tables = []
    for group in minibatch.groups if advantage.takes("rewards") else ():
        totals = shaped_rewards(group, config)
        if algorithm.by_turns:
            tables.append(trajectory_turns(group, turn_rewards(group, totals)[0], later=True))
        else:
            tables.append(_for_trajectories(group, totals.unsqueeze(1)))
    table = _stacked(tables) if tables else None
    keys = dict(algorithm)
    for batch in minibatch.batches:
        mask = batch.loss_mask
        data = {
            "values": batch.old_values,
            "old_logprobs": batch.old_logprobs,
            "teacher_logprobs": batch.ref_logprobs,
        }
        tensors = {
            name: None if x is None else torch.where(mask.bool(), x, 0.0) for name, x in data.items()
        }
        if table is not None:
            rows = batch_rows(table, batch)
            if algorithm.by_turns:
                rewards = advantages.at_turn_ends(rows, mask)
            else:
                rewards = advantages.at_sequence_end(rows[:, 0], mask)
            tensors["rewards"] = rewards + _kl_penalty(batch, algorithm)
        credit = advantage(keys, mask=mask, **tensors)
        batch.advantages, batch.returns = credit if advantage.takes("values") else (credit, None)


def _credit_groups(
    minibatch: MiniBatch, config: TrainConfig, advantage: Advantage, reward_weights: dict[str, float]
) -> None:
    """Set advantages of episodes relative to their group, the same on all tokens of an episode, or
    of a turn.
    """
    turns = config.algorithm.by_turns
    sizes = [len(group) for group in minibatch.groups]
    penalties = _kl_penalties(minibatch, config.algorithm).split(sizes)
    tables = []
    for group, penalty in zip(minibatch.groups, penalties, strict=True):
        if turns:
            tables.append(trajectory_turns(group, _turn_advantages(group, config, advantage)))
        else:
            outcome = _outcome_advantages(group, penalty, config, advantage, reward_weights)
            tables.append(_for_trajectories(group, outcome))
    table = _stacked(tables)
    for batch in minibatch.batches:
        rows = batch_rows(table, batch)
        mask = batch.loss_mask
        batch.advantages = advantages.spread_over_turns(rows, mask) if turns else rows.expand_as(mask)


def _outcome_advantages(
    group: Group,
    penalties: Tensor,
    config: TrainConfig,
    advantage: Advantage,
    reward_weights: dict[str, float],
) -> Tensor:
    """Return the advantages of a group's episodes, [G, 1] float32; `penalties` [G] are added to the
    rewards.

    If rewards are normalised one by one, the penalty of long answers, minus its mean, is added to
    the result: its unit is then a reward's standard deviation, so that a token over the margin
    costs little. As a reward of its own it would be normalised to the size of the other rewards,
    however small it is.
    """
    if config.algorithm.rewards_apart:
        rewards, weights = groups.reward_components(group, reward_weights, config.reward.error_reward)
        relative = advantages.normalize_then_sum(rewards.unsqueeze(1), weights)
        overlong = groups.overlong_penalty(group, config).unsqueeze(0)
        return (relative + advantages.centred(overlong)).T
    totals = shaped_rewards(group, config) + penalties
    return advantage(dict(config.algorithm), rewards=totals.unsqueeze(0)).T


def _turn_advantages(group: Group, config: TrainConfig, advantage: Advantage) -> Tensor:
    """Return the advantages of a group's turns, [G, K] float32: each turn's return relative to that
    turn of other episodes.

    An episode's turns are those of its trajectories, end to end: its third turn is compared with
    the third turns of the others, whichever trajectory they are in, because the length of the rest
    of the episode counts.
    """
    rewards, taken = turn_rewards(group, shaped_rewards(group, config))
    to_go = advantages.returns_to_go(rewards, taken, config.algorithm.gamma)
    by_std = advantage.takes("normalize_std") and config.algorithm.normalize_std
    return advantages.turn_relative(to_go.unsqueeze(0), taken.unsqueeze(0), by_std)[0]


def _kl_penalty(batch: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return KL's share of each token's reward, [B, T-1]; zeros if KL is not in the reward."""
    if not algorithm.kl_in_reward:
        return torch.zeros_like(batch.loss_mask)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    old = batch.old_logprobs
    estimate = kl.divergence(algorithm.kl_estimator, old, old, batch.ref_logprobs, algorithm.kl_clamp)
    return kl.penalty(estimate, batch.loss_mask, algorithm.kl_coef)


def _kl_penalties(minibatch: MiniBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return KL's share of each episode's reward, [E] over all ranks. Collective if KL is in the
    reward.
    """
    sizes = [len(episode) for group in minibatch.groups for episode in group]
    if not algorithm.kl_in_reward:
        return torch.zeros(len(sizes))
    local = torch.zeros(sum(sizes))
    for batch in minibatch.batches:
        if batch.rows:
            local[batch.rows] = _kl_penalty(batch, algorithm).sum(dim=1).float().cpu()
    payload = local[minibatch.shares[rank()]].numpy().tobytes()
    penalties = torch.empty_like(local)
    for share, part in zip(minibatch.shares, send_to_all(payload), strict=True):
        penalties[share] = torch.tensor(np.frombuffer(part, dtype=np.float32))
    return torch.stack([part.sum() for part in penalties.split(sizes)])


def _whiten(batches: list[MicroBatch]) -> None:
    """Normalise advantages by the mean and the standard deviation over the whole step.
    Collective.
    """
    # Every micro-batch is counted by all ranks that share it, equally often, which changes neither
    # mean nor deviation.
    total = sum(
        (advantages.moments(b.advantages, b.loss_mask).cpu() for b in batches), torch.zeros(3).double()
    )
    summed = all_reduce_sum(dict(zip(("count", "sum", "squares"), total.tolist(), strict=True)))
    total = torch.tensor(list(summed.values()), dtype=torch.float64)
    for batch in batches:
        batch.advantages = advantages.whiten(
            batch.advantages, batch.loss_mask, total.to(batch.advantages.device)
        )


def _for_trajectories(group: Group, table: Tensor) -> Tensor:
    """Expand a table [G, K] of episodes to rows [N, K] of their trajectories, each with the row of
    its episode.
    """
    return table.repeat_interleave(torch.tensor([len(episode) for episode in group]), dim=0)


def _stacked(tables: list[Tensor]) -> Tensor:
    """Stack the tables [G, K] of several groups, padded with zeros to the width of the widest."""
    width = max((table.shape[1] for table in tables), default=1)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
