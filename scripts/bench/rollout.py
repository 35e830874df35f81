#!/usr/bin/env python3
"""Overhead of our rollouts over a bare AsyncLLM: the same engine, prompts, sampling parameters and seeds, in turn.

    python scripts/bench/rollout.py [--preset 10M] [--prompts 32] [--group 8] [--max-tokens 64] [--json FILE]

bare    every request of the batch handed to AsyncLLM.generate at once, in one asyncio.gather
ours    generation.rollouts.episodes.rollout, with a reward that costs nothing

The prefix cache is emptied before each measurement, and which of the two goes first alternates. The last column is the
share of answers that are the same token by token: all of them in float32 on CPU, fewer where the arithmetic depends on
the batch.
"""

import argparse
import asyncio
import gc
import os
import random
import time
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import (
    PRESETS,
    add_engine,
    add_model,
    command_line,
    engine_for,
    show_rounds,
    start,
)

from generation.engine.engine import Engine
from generation.engine.sampling import SamplingSettings, sample_seed, vllm_sampling_params
from generation.rollouts.episodes import RolloutSettings, rollout
from generation.trajectory import Trajectory

Tokens = dict[tuple[int, int], list[int]]
"""(prompt, sample) -> the sampled ids."""


async def bare(engine: Engine, prompts: list[list[int]], settings: RolloutSettings) -> Tokens:
    """Sample with vLLM alone."""

    async def one(prompt: int, sample: int) -> list[int]:
        seed = sample_seed(settings.seed, settings.step, prompt, sample)
        params = vllm_sampling_params(settings.sampling, seed)
        request = f"bare-{settings.step}-{prompt}-{sample}"
        async for output in engine.llm.generate({"prompt_token_ids": prompts[prompt]}, params, request):
            final = output
        return list(final.outputs[0].token_ids)

    places = [(p, s) for p in range(len(prompts)) for s in range(settings.group_size)]
    return dict(zip(places, await asyncio.gather(*(one(*place) for place in places)), strict=True))


async def ours(engine: Engine, prompts: list[list[int]], settings: RolloutSettings) -> Tokens:
    """Sample as the training loop does."""
    unclaimed = iter(range(len(prompts)))

    async def score(trajectory: Trajectory) -> None:
        trajectory.reward = 1.0

    trajectories = await rollout(engine, prompts, settings, lambda: next(unclaimed, None), score)
    return {(t.prompt_index, t.sample_index): t.response_ids for t in trajectories}


@dataclass
class Round:
    """Seconds and results of both ways on one batch."""

    seconds: dict[str, float]
    sampled: dict[str, Tokens]

    def speed(self, way: str) -> float:
        """Return the tokens per second of one way."""
        return sum(map(len, self.sampled[way].values())) / self.seconds[way]

    def row(self) -> list[float]:
        """Return the tokens per second of both ways, their ratio, and the share of equal answers."""
        both = list(zip(*(self.sampled[way].items() for way in ("bare", "ours")), strict=True))
        equal = sum(a == b for a, b in both) / len(both)
        return [self.speed("bare"), self.speed("ours"), self.speed("ours") / self.speed("bare"), equal]


async def compare(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> list[Round]:
    """Run both ways in every round; the first round does not count."""
    rounds = []
    gc.collect()
    gc.freeze()  # as the training loop does; a collection of all objects takes 0.4 s
    for step in range(options.rounds + 1):
        sampling = SamplingSettings(options.max_tokens)
        settings = RolloutSettings(options.group, sampling, policy_version=0, seed=0, step=step)
        current = Round({}, {})
        for way in (bare, ours) if step % 2 else (ours, bare):
            await engine.reset_prefix_cache()
            start = time.perf_counter()
            sampled = await way(engine, prompts, settings)
            current.seconds[way.__name__] = time.perf_counter() - start
            current.sampled[way.__name__] = dict(sorted(sampled.items()))
        rounds.append(current)
    return rounds[1:]


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    with engine_for(options, plain_cpu_weights=options.plain) as leader:
        choice = random.Random(0)
        prompts = [
            choice.choices(range(PRESETS[options.preset][-1]), k=options.prompt_tokens)
            for _ in range(options.prompts)
        ]
        rounds = leader.thread.run(compare(leader.engine, prompts, options), 3600, "the benchmark")
    batch = (
        f"{options.prompts} prompts x {options.group} samples, up to {options.max_tokens} tokens each"
    )
    title = f"{options.preset} {options.dtype}: {batch}"
    note = f"{options.max_num_seqs} sequences at a time, {torch.get_num_threads()} thread(s)"
    columns = ["bare tok/s", "ours tok/s", "ours / bare", "same answers"]
    formats = (".0f", ".0f", ".3f", ".0%")
    show_rounds(options.json, title, columns, formats, [result.row() for result in rounds], [note])


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    add_model(parser, "10M")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="CPU: weights not packed for oneDNN, as small models like it",
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a batch (default: 32)")
    parser.add_argument("--group", type=int, default=8, help="samples of each (default: 8)")
    add_engine(parser, prompt_tokens=64, max_tokens=64, max_num_seqs=64)
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse())
