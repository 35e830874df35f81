"""What each optimizer step learns from, and which rank trains on what."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from generation.trajectory import Trajectory
from sharding.collectives import rank, world_size
from trainer.batching import MicroBatch, Sample, assign_to_ranks, micro_batches
from trainer.config import TrainConfig
from trainer.learning.groups import Group


@dataclass
class MiniBatch:
    """One optimizer step's: the same groups on all ranks, and this rank's share of them in micro-batches.

    Attributes:
        batches: their `rows` are positions in the groups' N answers, end to end.
        tokens: trainable ones, all ranks.
        sequences: with a trainable token, all ranks.
    """

    groups: list[Group]
    batches: list[MicroBatch]
    tokens: int
    sequences: int


def prepare(groups: list[Group], config: TrainConfig, pad_id: int, device: torch.device) -> MiniBatch:
    """Deal the groups' answers out to ranks and cut this rank's into micro-batches. Collective.

    Counts are of the masks as they are trained on: a filtered answer is in none of them. What is left out later, since
    engine and trainer disagree on it or it is of low entropy, is multiplied into the loss and stays in the counts, as
    in the papers.
    """
    samples = [to_sample(t, config.algorithm.overlong_filter) for group in groups for t in group]
    mine = assign_to_ranks([len(s.input_ids) for s in samples], world_size())[rank()]
    budget, packing = config.batch.tokens_per_micro_batch, config.batch.packing
    batches = micro_batches([samples[i] for i in mine], budget, pad_id, device, packing=packing)
    for batch in batches:
        batch.rows = [mine[row] for row in batch.rows]
    tokens = [sum(sample.loss_mask) for sample in samples]
    return MiniBatch(groups, batches, sum(tokens), sum(map(bool, tokens)))


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
    """Consecutive groups in at most `parts` portions, as even as can be; no group is torn, no portion empty."""
    size = max(1, math.ceil(len(groups) / parts))
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def own_rows(table: Tensor, batch: MicroBatch) -> Tensor:
    """The rows [B, K] of a table [N, K] over all answers that are a micro-batch's; zeros where it only takes part."""
    if not batch.rows:
        return torch.zeros(len(batch.lengths), table.shape[1], device=batch.loss_mask.device)
    return table[batch.rows].to(batch.loss_mask)
