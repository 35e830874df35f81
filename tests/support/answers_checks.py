"""Exchange a step's answers between several ranks, and counts what each rank receives; for test_answers_ranks.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from generation.trajectory import Trajectory
from sharding import ranks
from sharding.ranks import exchange, is_main, rank, world_size
from tests.support.learning_steps import TablePolicy, make_batcher
from tests.support.recipes import make_config
from trainer.distributed import destroy_process_group, init_process_group
from trainer.learning.answers import gather_answers
from trainer.learning.groups import make_groups, prepare, split
from trainer.learning.learner import mark_high_entropy
from trainer.learning.metrics import engine_gap, rollout_metrics

SHARE, VOCABULARY = 64, 11


def trajectories(number: int) -> list[Trajectory]:
    """Return the trajectories that rank `number` has sampled: eight groups of eight."""
    generator = torch.Generator().manual_seed(number)
    sampled = []
    for place in range(SHARE):
        length = int(torch.randint(1, 200, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        logprobs = (-2.4 + 0.2 * torch.randn(length, generator=generator)).tolist()
        prompt, sample = 8 * number + place // 8, place % 8
        sampled.append(
            Trajectory(prompt, sample, [3] * 20, ids, [1] * length, logprobs, reward=place / 7)
        )
        sampled[-1].reward_parts = {"match": 0.1 * place}
    return sampled


class Received:
    """Counts the bytes that this rank gets from others by the collectives of `sharding.ranks`."""

    def __init__(self) -> None:
        self.bytes = 0
        self.summed = 0  # apart: a ring of ranks passes on less than twice the size of what is summed
        self._all_to_all, self._swap, self._all_reduce = (
            dist.all_to_all_single,
            ranks._swap,
            dist.all_reduce,
        )

    def all_to_all_single(
        self, output: Any, sent: Any, incoming: Any = None, outgoing: Any = None
    ) -> None:
        self._all_to_all(output, sent, incoming, outgoing)
        kept = incoming[rank()] if incoming else output.numel() // world_size()
        self.bytes += (output.numel() - kept) * output.element_size()

    def swap(self, message: list[Any], peer: int, group: Any) -> list[Any]:
        reply = self._swap(message, peer, group)
        self.bytes += len(msgspec.msgpack.encode(reply))
        return reply

    def all_reduce(self, tensor: Any) -> None:
        self._all_reduce(tensor)
        self.summed += tensor.numel() * tensor.element_size()

    def during(self, block: Callable[[], Any]) -> Any:
        """Call `block` with the counting collectives in place."""
        dispatched = {name: getattr(self, name) for name in ("all_to_all_single", "all_reduce")}
        with patch.multiple(dist, **dispatched), patch.object(ranks, "_swap", self.swap):
            return block()


def exchange_a_step(results: str) -> None:
    """Exchange the answers of two optimizer steps, from sampling to the gap between engine and trainer.

    Rank 0 writes to `results` what each rank received and trained on.
    """
    init_process_group(120, "cpu")
    config = make_config(
        batch={"updates_per_step": 2, "tokens_per_micro_batch": 512}, algorithm={"num_iterations": 1}
    )
    policy, received = TablePolicy(), Received()
    answers = received.during(lambda: gather_answers(trajectories(rank())))
    figures = received.during(lambda: rollout_metrics(answers))
    portions = split(make_groups(answers), 2)
    minibatches = received.during(lambda: prepare(portions, config, make_batcher(config)))
    batches = [batch for minibatch in minibatches for batch in minibatch.batches]
    outputs = policy.score(batches, 1.0)
    gaps = [
        (b.trained(o.logprobs), b.trained(b.engine_logprobs))
        for b, o in zip(batches, outputs, strict=True)
    ]
    figures |= received.during(lambda: engine_gap(gaps, config.algorithm))
    received.during(lambda: mark_high_entropy(batches, outputs, 0.2))
    trained = []
    for minibatch in minibatches:
        for batch in minibatch.batches:
            for row, place in enumerate(batch.rows):
                ids = batch.input_ids[row, : batch.lengths[row]].tolist()
                logprobs = batch.engine_logprobs[row, : batch.lengths[row] - 1].double().sum().item()
                answer = [a for g in minibatch.groups for e in g for a in e][place]
                trained.append([answer.prompt_index, answer.sample_index, ids, logprobs])
    report = {
        "received": received.bytes,
        "summed": received.summed,
        "figures": figures,
        "trained": trained,
        "decisive": sum(
            int(batch.high_entropy.sum()) for batch in batches if batch.high_entropy is not None
        ),
        "entropies": [
            value
            for b, o in zip(batches, outputs, strict=True)
            for value in b.trained(o.entropy).tolist()
        ],
    }
    reports = exchange(report)
    if is_main():
        Path(results).write_text(json.dumps(reports))
    destroy_process_group()
