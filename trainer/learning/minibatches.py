"""What each optimizer step learns from, and which rank trains on what."""

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.collectives import rank, world_size
from trainer.answers import hand_over
from trainer.batching import MicroBatch, Sample, assign_to_ranks, micro_batches
from trainer.config import TrainConfig
from trainer.learning.groups import Group


@dataclass
class MiniBatch:
    """One optimizer step's: the same groups on all ranks, and this rank's share of them in micro-batches.

    Attributes:
        batches: their `rows` are positions in the groups' N trajectories, end to end.
        tokens: trainable ones, all ranks.
        sequences: with a trainable token, all ranks.
        shares: of each rank the positions it trains on, ascending.
    """

    groups: list[Group]
    batches: list[MicroBatch]
    tokens: int
    sequences: int
    shares: list[list[int]] = field(default_factory=list)


def prepare(portions: list[list[Group]], config: TrainConfig, pad_id: int, device: torch.device) -> list[MiniBatch]:
    """Deal each portion's trajectories out to ranks and cut this rank's into micro-batches. Collective.

    Counts are of the masks as they are trained on: a filtered answer is in none of them. What is left out later, since
    engine and trainer disagree on it or it is of low entropy, is multiplied into the loss and stays in the counts, as
    in the papers.
    """
    answers = [[t for group in groups for episode in group for t in episode] for groups in portions]
    shares = [assign_to_ranks([t.length for t in each], world_size()) for each in answers]
    filters = config.algorithm.overlong_filter
    samples = hand_over(answers, shares, partial(to_sample, overlong_filter=filters))
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    minibatches = []
    for groups, each, by_rank, own in zip(portions, answers, shares, samples, strict=True):
        batches = micro_batches(own, budget, pad_id, device, packing=packing)
        for batch in batches:
            batch.rows = [by_rank[rank()][row] for row in batch.rows]
        tokens = [t.trainable(filters) for t in each]
        minibatches.append(MiniBatch(groups, batches, sum(tokens), sum(map(bool, tokens)), by_rank))
    return minibatches


def to_sample(trajectory: Trajectory, overlong_filter: bool = False) -> Sample:
    """Prompt and response in one sequence; mask and log-probabilities are 0 on the prompt.

    With `overlong_filter` an answer that was cut off has a mask of 0 throughout (`shaping.finished_only`).
    """
    prompt = len(trajectory.prompt_ids)
    cut = overlong_filter and trajectory.finish_reason == "length"
    return Sample(
        input_ids=trajectory.prompt_ids + trajectory.response_ids,
        loss_mask=[0] * prompt + ([0] * len(trajectory.loss_mask) if cut else trajectory.loss_mask),
        engine_logprobs=[0.0] * prompt + trajectory.logprobs,
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
