#!/usr/bin/env python3
"""Rollouts with slow tools, each trajectory by itself, against all of them in lock-step.

    python scripts/bench/lockstep.py [--trajectories 128] [--calls 4] [--seconds 0.3] [--json FILE]

by itself   half of the trajectories answer once; the others call a tool that sleeps, `calls` times, with an answer
            before and after each. Nobody waits for anybody
lock-step   the same prompts, seeds and tokens, as loops over a batch have it: a turn's calls begin when everybody has
            answered, and its answers when all calls have returned

Ids are random, the answers of an untrained model.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, median, save, show, start, start_engine, this_device
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from generation.engine.engine import Engine
from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM
from generation.rollouts.run import EpisodeSetup, RolloutSettings, rollout
from generation.trajectory import Trajectory
from trainer.commands.tiny_model import make_tiny_model

TOLD = [{"role": "tool", "content": "ok"}]


class Together:
    """Lets trajectories go on when all that are still there have arrived."""

    def __init__(self, count: int) -> None:
        self._here, self._there, self._go = 0, count, asyncio.Event()

    async def arrive(self) -> None:
        """Wait for the others."""
        self._here += 1
        go = self._go
        self._look()
        await go.wait()

    def leave(self) -> None:
        """Be waited for no more."""
        self._there -= 1
        self._look()

    def _look(self) -> None:
        if self._here == self._there:
            self._go.set()
            self._here, self._go = 0, asyncio.Event()


async def run(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, step: int, lockstep: bool
) -> tuple[float, int]:
    """One round: its seconds, and the tokens sampled."""
    together = Together(options.trajectories) if lockstep else None
    # A sixteenth of all ids ends an answer, so that answers end by themselves, after 16 tokens on average.
    sampling = SamplingSettings(64, stop_token_ids=list(range(10, 28)))
    settings = RolloutSettings(1, sampling, policy_version=0, seed=0, step=step)

    async def episode(llm: PolicyLLM, row: dict[str, Any], sampling: SamplingSettings) -> Trajectory:
        chat = llm.conversation()
        await chat.sample(sampling)
        for _ in range(options.calls if llm.prompt_index % 2 else 0):
            if together is not None:
                await together.arrive()
            async with llm.away():
                await asyncio.sleep(options.seconds)
            if together is not None:
                await together.arrive()
            chat.add(TOLD)
            await chat.sample(sampling)
        if together is not None:
            together.leave()
        return chat.trajectory()

    async def score(trajectory: Trajectory) -> None:
        trajectory.reward = 1.0

    await engine.reset_prefix_cache()
    prompts = [[30 + i % 200, *range(40, 72)] for i in range(options.trajectories)]
    unclaimed = iter(range(options.trajectories))
    begun = time.perf_counter()
    setup = EpisodeSetup(episode, tokenizer)
    done = await rollout(engine, prompts, settings, lambda: next(unclaimed, None), score, setup)
    if errors := [trajectory.error for trajectory in done if trajectory.error]:
        raise RuntimeError(errors[0])
    return time.perf_counter() - begun, sum(sum(trajectory.loss_mask) for trajectory in done)


async def compare(engine: Engine, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of both ways, and their ratio, in every round; the first round does not count."""
    rows = []
    for step in range(options.rounds + 1):
        alone, tokens = await run(engine, tokenizer, options, step, lockstep=False)
        together, same = await run(engine, tokenizer, options, step, lockstep=True)
        if tokens != same:
            raise RuntimeError(f"{tokens} tokens, then {same}: not the same work")
        rows.append([alone, together, together / alone])
    return rows[1:]


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    folder = make_tiny_model(Path(tempfile.mkdtemp()) / "model")
    leader = start_engine(
        folder, this_device(), dtype="float32", max_model_len=1024, max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=256 << 20, plain_cpu_weights=True, sleep=False,
    )  # fmt: skip
    try:
        leader.engine.state.adopt_checkpoint(0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = leader.thread.run(compare(leader.engine, tokenizer, options), 3600, "the benchmark")
    finally:
        leader.engine.close()
    lines = [*rows, [median(list(column)) for column in zip(*rows, strict=True)]]
    names = [*map(str, range(1, len(rows) + 1)), "median"]
    title = f"{options.trajectories} trajectories, half of them with {options.calls} calls of {options.seconds:g} s"
    columns = ["round", "by itself s", "lock-step s", "ratio"]
    cells = [[f"{seconds:.2f}" for seconds in line] for line in lines]
    floor = f"calls alone take {options.calls * options.seconds:g} s either way"
    show(title, columns, [[name, *row] for name, row in zip(names, cells, strict=True)], [floor])
    save(options.json, {"title": title, "columns": columns[1:], "rounds": rows, "median": lines[-1]})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--trajectories", type=int, default=128, help="how many run at once (default: 128)")
    parser.add_argument("--calls", type=int, default=4, help="of every second trajectory (default: 4)")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a call takes (default: 0.3)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences the engine runs at once (default: 64)")
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse())
