"""Episodes by prompt, their rewards as the learner sees them, and what each optimizer step and rank learns from."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from generation.trajectory import Trajectory, by_episode
from sharding.ranks import rank
from trainer.algorithms.shaping import length_normalized, soft_overlong_penalty
from trainer.config.schema import TrainConfig
from trainer.config.slices import longest_answer
from trainer.errors import UserError
from trainer.learning.answers import Answer, hand_over, old_tokens, token_ages
from trainer.learning.batching import deal, micro_batches
from trainer.learning.routes import checked_routes
from trainer.types import MicroBatch, RouteFormat, Sample

Episode = list[Answer]
"""One sample of its group, however many trajectories it has: it counts once wherever samples are compared.

Its reward, and the parts of it, are those of its last trajectory, which holds the final answer; rewards that earlier
ones have are not looked at, since they are either the same or judge an answer that was not the last. SkyRL's step-wise
training does the same. Its turns and its tokens are those of all its trajectories, end to end.
"""
Group = list[Episode]
"""The episodes of one prompt that can be trained on."""


def make_groups(answers: list[Answer]) -> list[Group]:
    """Episodes by prompt, in the order of prompts. Failed ones are left out, before any mean is taken.

    An episode has failed when any of its trajectories has: the others are part of something that went wrong.
    """
    groups: dict[int, Group] = defaultdict(list)
    for episode in by_episode(answers):
        if not any(answer.error for answer in episode):
            groups[episode[0].prompt_index].append(episode)
    return [group for _, group in sorted(groups.items())]


def informative(group: Group) -> bool:
    """True if rewards differ, in sum or turn by turn, before length counts: DAPO (arXiv:2503.14476), equation 11."""
    worth = [(episode[-1].reward, [reward for t in episode for reward in t.turn_rewards]) for episode in group]
    return any(other != worth[0] for other in worth)


def shaped_rewards(group: Group, config: TrainConfig) -> Tensor:
    """Rewards [G] float32, divided by length, then less the penalty of long answers, where the recipe says so."""
    rewards = torch.tensor([episode[-1].reward for episode in group])
    algorithm = config.algorithm
    if algorithm.length_strength:
        _refuse_negative(group, "length_strength")
        lengths = torch.tensor([float(sum(t.sampled for t in episode)) for episode in group])
        rewards = length_normalized(rewards.unsqueeze(0), lengths.unsqueeze(0), algorithm.length_strength)[0]
    if algorithm.advantage_record.nonnegative:
        _refuse_negative(group, f"advantage: {algorithm.advantage}")
    return rewards + overlong_penalty(group, config)


def overlong_penalty(group: Group, config: TrainConfig) -> Tensor:
    """See `soft_overlong_penalty`; [G], of each episode's longest trajectory, zeros where the recipe has none."""
    margin = config.algorithm.overlong_margin
    if margin is None:
        return torch.zeros(len(group))
    longest = longest_answer(config)
    lengths = torch.tensor([float(max(t.sampled for t in episode)) for episode in group])
    return soft_overlong_penalty(lengths, longest, round(margin * longest))


def reward_components(group: Group, weights: dict[str, float], failed: float) -> tuple[Tensor, Tensor]:
    """Each reward by itself, [R, G], and its weight [R]: of every function, and of the episode; none that only shapes.

    `weights` are those of the functions by label. `failed` is the reward of a function that failed
    (`reward.error_reward`); where none did, the weighted sum is the reward.
    """
    last = [episode[-1] for episode in group]
    columns = [[t.reward_parts.get(label, failed) for t in last] for label in weights]
    columns.append([t.reward - _scored(t, weights, failed) for t in last])
    return torch.tensor(columns, dtype=torch.float64), torch.tensor([*weights.values(), 1.0])


def _scored(answer: Answer, weights: dict[str, float], failed: float) -> float:
    """The reward functions' part of the reward: if one failed, `failed` in place of their sum."""
    parts = answer.reward_parts
    return sum(w * parts[label] for label, w in weights.items()) if weights.keys() <= parts.keys() else failed


def turn_rewards(group: Group, totals: Tensor) -> tuple[Tensor, Tensor]:
    """The rewards of turns, [G, K] float32: each its own, 0 if none, and the last one the rest of `totals` [G], which
    includes those of turns; and [G, K], 1 where the episode has this turn: a run of tokens that the policy sampled.
    """
    counts = [sum(t.runs for t in episode) for episode in group]
    rewards = torch.zeros(len(group), max(1, *counts))
    for row, episode, count, total in zip(rewards, group, counts, totals.tolist(), strict=True):
        if count:
            own = [reward for t in episode for reward in (t.turn_rewards + [0.0] * t.runs)[: t.runs]][: count - 1]
            row[: count - 1] = torch.tensor(own)
            row[count - 1] = total - sum(own)
    return rewards, (torch.arange(rewards.shape[1]) < torch.tensor(counts).unsqueeze(1)).float()


def own_turns(group: Group, table: Tensor, later: bool = False) -> Tensor:
    """From a table [G, K] of episodes' turns the rows [N, K] of their trajectories, each beginning with its first turn.

    With `later`, a trajectory's last turn also has what the episode's later trajectories have, so that a sum over
    a row from some turn on is the sum over the episode from there on. Columns after its own turns mean nothing.
    """
    rows = []
    for row, episode in zip(table, group, strict=True):
        first = 0
        for turns in (answer.runs for answer in episode):
            own = row.roll(-first)
            first += turns
            if later and turns:
                own[turns - 1] += row[first:].sum()
            rows.append(own)
    return torch.stack(rows)


def _refuse_negative(group: Group, key: str) -> None:
    worst = min((episode[-1] for episode in group), key=lambda t: t.reward)
    if worst.reward < 0:
        parts = worst.trajectory.reward_parts if worst.trajectory is not None else f"sampled on rank {worst.rank}"
        raise UserError(
            f"algorithm.{key} needs rewards of at least 0, but an answer got {worst.reward:g} "
            f"({parts or 'from its episode'}): shift the rewards, or leave that key out"
        )


@dataclass
class MiniBatch:
    """One optimizer step's: the same groups on all ranks, and this rank's share of them in micro-batches."""

    groups: list[Group]
    batches: list[MicroBatch]  # their `rows` are positions in the groups' N trajectories, end to end
    tokens: int  # trainable ones, all ranks
    sequences: int  # with a trainable token, all ranks
    shares: list[list[int]] = field(default_factory=list)  # of each rank the positions it trains on, ascending


def prepare(
    portions: list[list[Group]],
    config: TrainConfig,
    pad_id: int,
    device: torch.device,
    routes: RouteFormat | None = None,
    version: int | None = None,
    worth: Callable[[int], int] = lambda length: length,  # the work of a sequence by its length
    image_token: float = 0.0,  # see `micro_batches`
) -> list[MiniBatch]:
    """Deal each portion's trajectories out to ranks and cut this rank's into micro-batches. Collective.

    `version` is the policy's present one, where answers may have tokens of earlier ones.

    Counts are of the masks as they are trained on: a filtered answer is in none of them. What is left out later, since
    engine and trainer disagree on it or it is of low entropy, is multiplied into the loss and stays in the counts, as
    in the papers. With `routes` the samples have the engine's.
    """
    answers = [[t for group in groups for episode in group for t in episode] for groups in portions]
    ways = config.policy.sequence_parallel
    shares = [deal([t.length for t in each], worth, ways) for each in answers]
    filters, masks = config.algorithm.overlong_filter, config.rollout.old_tokens == "mask"
    make = partial(to_sample, overlong_filter=filters, routes=routes, version=version, mask_old=masks)
    samples = hand_over(answers, shares, make, routes)
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    minibatches = []
    for groups, each, by_rank, own in zip(portions, answers, shares, samples, strict=True):
        batches = micro_batches(own, budget, pad_id, device, None, packing, ways, worth, image_token)
        for batch in batches:
            batch.rows = [by_rank[rank()][row] for row in batch.rows]
        tokens = [t.trainable(filters, masks) for t in each]
        minibatches.append(MiniBatch(groups, batches, sum(tokens), sum(map(bool, tokens)), by_rank))
    return minibatches


def to_sample(
    trajectory: Trajectory,
    overlong_filter: bool = False,
    routes: RouteFormat | None = None,
    version: int | None = None,
    mask_old: bool = False,
) -> Sample:
    """Prompt and response in one sequence; mask and log-probabilities are 0 on the prompt.

    With `overlong_filter` an answer that was cut off has a mask of 0 throughout, and with `mask_old` tokens that were
    sampled before the policy had `version` have one; with `routes` a sample has the engine's (`checked_routes`).
    """
    prompt, cut = len(trajectory.prompt_ids), overlong_filter and trajectory.finish_reason == "length"
    masked = len(trajectory.loss_mask) if cut else old_tokens(trajectory, version) if mask_old else 0
    ages = token_ages(trajectory, version)
    return Sample(
        input_ids=trajectory.prompt_ids + trajectory.response_ids,
        loss_mask=[0] * (prompt + masked) + trajectory.loss_mask[masked:],
        engine_logprobs=[0.0] * prompt + trajectory.logprobs,
        routes=None if routes is None else checked_routes(trajectory, routes),
        ages=[0] * prompt + ages if any(ages) else [],
        images=trajectory.images,
        image_spans=trajectory.image_spans,
    )


def split(groups: list[Group], parts: int) -> list[list[Group]]:
    """Consecutive groups in `parts` portions whose sizes differ by one at most; fewer groups are a portion each."""
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds) if start < end]


def own_rows(table: Tensor, batch: MicroBatch) -> Tensor:
    """The rows [B, K] of a table [N, K] over all trajectories that are a micro-batch's; zeros where it has none."""
    if not batch.rows:
        return torch.zeros(len(batch.lengths), table.shape[1], device=batch.loss_mask.device)
    return table[batch.rows].to(batch.loss_mask)
