"""Groups of episodes by prompt, their shaped rewards, and the batches that each optimizer step and
rank trains on.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from generation.trajectory import Trajectory, by_episode
from sharding.ranks import rank
from trainer.algorithms.shaping import length_normalized, soft_overlong_penalty
from trainer.config.answer_age import longest_answer
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.learning.answers import Answer, exchange_samples, old_tokens, token_ages
from trainer.learning.batching import Batcher
from trainer.learning.routes import checked_routes
from trainer.types import MicroBatch, RouteFormat, Sample

Episode = list[Answer]
"""The trajectories of one sample of its group, which counts once, however many they are, wherever
samples are compared.

Its reward, and the parts of it, are those of its last trajectory, which has the final answer.
Rewards of earlier trajectories are ignored, since they are either the same or judge an answer that
was not the last. SkyRL's step-wise training does the same. Its turns and its tokens are those of
all its trajectories, end to end. A trajectory with a group of its own counts by itself.
"""
Group = list[Episode]
"""The episodes of one prompt that can be trained on, and are compared with each other."""


def make_groups(answers: list[Answer]) -> list[Group]:
    """Group episodes by prompt, in the order of prompts. Failed episodes are left out before any
    mean is taken.

    An episode has failed if any of its trajectories has, since the others belong to the same
    failure. Episodes whose last answer nothing has judged, since all reward functions abstained
    from it, are left out as well. A trajectory with the name of a group is an episode of that group
    of its prompt.
    """
    groups: dict[tuple[int, str], Group] = defaultdict(list)
    for episode in by_episode(answers):
        if any(answer.error for answer in episode):
            continue
        parts = [[answer] for answer in episode if answer.group]
        if rest := [answer for answer in episode if not answer.group]:
            parts.append(rest)
        for part in parts:
            if not part[-1].abstained:
                groups[part[-1].prompt_index, part[-1].group].append(part)
    return [group for _, group in sorted(groups.items())]


def informative(group: Group) -> bool:
    """Return True if a group's rewards, unshaped, differ in total or in a turn: DAPO
    (arXiv:2503.14476), equation 11.
    """
    rewards = []
    for episode in group:
        of_turns = [reward for t in episode for reward in t.turn_rewards]
        rewards.append((episode[-1].reward, of_turns))
    return any(other != rewards[0] for other in rewards)


def shaped_rewards(group: Group, config: TrainConfig) -> Tensor:
    """Return rewards [G] float32, divided by length and reduced by the penalty of long answers, if
    the recipe says so.
    """
    rewards = torch.tensor([episode[-1].reward for episode in group])
    algorithm = config.algorithm
    if algorithm.length_strength:
        _refuse_negative(group, "length_strength")
        sizes = []
        for episode in group:
            sizes.append(float(sum(t.sampled for t in episode)))
        lengths = torch.tensor(sizes).unsqueeze(0)
        rewards = length_normalized(rewards.unsqueeze(0), lengths, algorithm.length_strength)[0]
    if algorithm.advantage_record.nonnegative:
        _refuse_negative(group, f"advantage: {algorithm.advantage}")
    return rewards + overlong_penalty(group, config)


def overlong_penalty(group: Group, config: TrainConfig) -> Tensor:
    """Return the `soft_overlong_penalty` [G] of each episode's longest trajectory; zeros if the
    recipe has none.
    """
    margin = config.algorithm.overlong_margin
    if margin is None:
        return torch.zeros(len(group))
    longest = longest_answer(config)
    sizes = []
    for episode in group:
        sizes.append(float(max(t.sampled for t in episode)))
    return soft_overlong_penalty(torch.tensor(sizes), longest, round(margin * longest))


def reward_components(group: Group, weights: dict[str, float], failed: float) -> tuple[Tensor, Tensor]:
    """Return the separate rewards [R, G] and their weights [R]: one row per reward function, plus
    one for the episode's own.

    Shaping by length is excluded. `weights` are those of the functions by label. `failed` is the
    reward of a function that failed (`reward.error_reward`); NaN stands for one that abstained. If
    none failed, the weighted sum of the rows without NaN is the reward.
    """
    last = [episode[-1] for episode in group]
    columns = []
    for label in weights:
        columns.append([_component(t, label, failed) for t in last])
    columns.append([t.reward - _scored(t, weights, failed) for t in last])
    return torch.tensor(columns, dtype=torch.float64), torch.tensor([*weights.values(), 1.0])


def _component(answer: Answer, label: str, failed: float) -> float:
    """Return the reward that a function gave, or `failed` if a function failed on the answer, or
    NaN if this one abstained.
    """
    return answer.reward_parts.get(label, failed if answer.misjudged else math.nan)


def _scored(answer: Answer, weights: dict[str, float], failed: float) -> float:
    """Return the reward functions' part of an answer's reward: their weighted sum, or `failed` if
    one failed.
    """
    if answer.misjudged:
        return failed
    return sum(
        weight * answer.reward_parts[label]
        for label, weight in weights.items()
        if label in answer.reward_parts
    )


def turn_rewards(group: Group, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rewards of turns, [G, K] float32, and a mask [G, K] that is 1 where the episode
    has the turn.

    A turn is a run of tokens that the policy sampled. Each turn has its own reward, 0 if it has
    none; the last turn has the rest of the episode's `totals` [G], which include the rewards of
    turns.
    """
    counts = [sum(t.runs for t in episode) for episode in group]
    rewards = torch.zeros(len(group), max(1, *counts))
    for row, episode, count, total in zip(rewards, group, counts, totals.tolist(), strict=True):
        if count:
            own: list[float] = []
            for answer in episode:
                own += (answer.turn_rewards + [0.0] * answer.runs)[: answer.runs]
            first = own[: count - 1]
            row[: count - 1] = torch.tensor(first)
            row[count - 1] = total - sum(first)
    return rewards, (torch.arange(rewards.shape[1]) < torch.tensor(counts).unsqueeze(1)).float()


def trajectory_turns(group: Group, table: Tensor, later: bool = False) -> Tensor:
    """Turn a table [G, K] of episodes' turns into rows [N, K] of trajectories, each beginning with
    its first turn.

    With `later`, a trajectory's last turn also has the sum over the episode's later trajectories,
    so that the sum over a row from some turn on is the sum over the episode from there on. Columns
    after a trajectory's last turn have no meaning.
    """
    rows = []
    for row, episode in zip(table, group, strict=True):
        first = 0
        for answer in episode:
            turns = answer.runs
            shifted = row.roll(-first)
            first += turns
            if later and turns:
                shifted[turns - 1] += row[first:].sum()
            rows.append(shifted)
    return torch.stack(rows)


def _refuse_negative(group: Group, key: str) -> None:
    worst = min((episode[-1] for episode in group), key=lambda t: t.reward)
    if worst.reward < 0:
        parts: dict[str, float] | str = f"sampled on rank {worst.rank}"
        if worst.trajectory is not None:
            parts = worst.trajectory.reward_parts
        raise UserError(
            f"algorithm.{key} needs rewards of at least 0, but an answer got {worst.reward:g} "
            f"({parts or 'from its episode'}): shift the rewards, or leave "
            f"algorithm.{key.partition(':')[0]} out"
        )


@dataclass
class MiniBatch:
    """The data of one optimizer step: its groups, the same on all ranks, and this rank's share in
    micro-batches.
    """

    groups: list[Group]
    batches: list[MicroBatch]  # their `rows` are positions in the groups' N trajectories, end to end
    tokens: int  # number of trainable tokens, over all ranks
    sequences: int  # number of sequences with a trainable token, over all ranks
    # The positions that each rank trains on, ascending
    shares: list[list[int]] = field(default_factory=list)


def prepare(
    portions: list[list[Group]], config: TrainConfig, batcher: Batcher, version: int | None = None
) -> list[MiniBatch]:
    """Deal each portion's trajectories out to ranks and divide this rank's into micro-batches.
    Collective.

    `version` is the policy's current version, if answers may have tokens of earlier ones.

    Counts are those of the masks that are trained on, which exclude filtered answers. Tokens that
    are left out later, since engine and trainer disagree on them or their entropy is low, get a
    loss of 0 and stay in the counts, as in the papers.
    """
    filters = config.algorithm.overlong_filter
    masks = config.rollout.old_tokens == "mask"
    answers = []
    for groups in portions:
        answers.append([t for group in groups for episode in group for t in episode])
    shares = [batcher.deal_answers(portion) for portion in answers]
    make = partial(
        to_sample, overlong_filter=filters, routes=batcher.routes, version=version, mask_old=masks
    )
    samples = exchange_samples(answers, shares, make, batcher.routes)
    minibatches = []
    for groups, portion, by_rank, local in zip(portions, answers, shares, samples, strict=True):
        batches = batcher.micro_batches(local)
        for batch in batches:
            batch.rows = [by_rank[rank()][row] for row in batch.rows]
        tokens = [t.trainable(filters, masks) for t in portion]
        minibatches.append(MiniBatch(groups, batches, sum(tokens), sum(map(bool, tokens)), by_rank))
    return minibatches


def to_sample(
    trajectory: Trajectory,
    overlong_filter: bool = False,
    routes: RouteFormat | None = None,
    version: int | None = None,
    mask_old: bool = False,
) -> Sample:
    """Join prompt and response of a trajectory in one sequence; mask and log-probabilities are 0 on
    the prompt.

    With `overlong_filter`, the mask of an answer that was cut off is 0 throughout; with `mask_old`,
    it is 0 on tokens sampled before the policy had `version`. With `routes`, the sample has the
    engine's routes (`checked_routes`).
    """
    prompt = len(trajectory.prompt_ids)
    masked = 0
    if overlong_filter and trajectory.finish_reason == "length":
        masked = len(trajectory.loss_mask)
    elif mask_old:
        masked = old_tokens(trajectory, version)
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
    """Split groups into `parts` consecutive portions whose sizes differ by at most one, none of
    which is empty.
    """
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds) if start < end]


def batch_rows(table: Tensor, batch: MicroBatch) -> Tensor:
    """Return the rows [B, K] of a micro-batch in a table [N, K] over all trajectories; zeros for a
    zero-weight one.
    """
    if not batch.rows:
        return torch.zeros(len(batch.lengths), table.shape[1], device=batch.loss_mask.device)
    return table[batch.rows].to(batch.loss_mask)
