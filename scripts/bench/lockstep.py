#!/usr/bin/env python3
"""Rollouts with slow tools, each trajectory by itself, against all of them in lock-step.

    python scripts/bench/lockstep.py [--trajectories 128] [--calls 4] [--seconds 0.3] [--json FILE]

by itself   half of the trajectories answer once; the others call a tool that sleeps, `calls` times, with an answer
            before and after each. No trajectory waits for another
lock-step   the same prompts, seeds and tokens, in a loop over the batch: the calls of a turn begin when all
            trajectories have answered, and the next answers begin when all calls have returned

The model is untrained, and its ids are random.
"""

import argparse
import asyncio
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import show_rounds, start
from tools import command_line_of_calls, measure, play
from transformers import PreTrainedTokenizerBase

from generation.engine.engine import Engine
from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import PolicyLLM
from generation.trajectory import Trajectory

TOOL_RESULT = [{"role": "tool", "content": "ok"}]


class Together:
    """A barrier at which trajectories wait for each other; those that have left are not waited for."""

    def __init__(self, count: int) -> None:
        self._here, self._there, self._go = 0, count, asyncio.Event()

    async def arrive(self) -> None:
        """Wait until all other trajectories have arrived or left."""
        self._here += 1
        go = self._go
        self._look()
        await go.wait()

    def leave(self) -> None:
        """Leave for good, so that no trajectory waits for this one."""
        self._there -= 1
        self._look()

    def _look(self) -> None:
        if self._here == self._there:
            self._go.set()
            self._here, self._go = 0, asyncio.Event()


async def run(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    step: int,
    lockstep: bool,
) -> tuple[float, int]:
    """Run a round; return its seconds and the tokens sampled."""
    together = Together(options.trajectories) if lockstep else None

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
            chat.add(TOOL_RESULT)
            await chat.sample(sampling)
        if together is not None:
            together.leave()
        return chat.trajectory()

    took, done = await play(engine, tokenizer, episode, step, options.trajectories)
    return took, sum(sum(trajectory.loss_mask) for trajectory in done)


async def compare(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[list[float]]:
    """Return the seconds of both ways and their ratio, for every round except the first."""
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
    title = f"{options.trajectories} trajectories, half of them with {options.calls} calls of {options.seconds:g} s"
    floor = f"calls alone take {options.calls * options.seconds:g} s either way"
    rounds = measure(options, compare, max_model_len=1024)
    show_rounds(
        options.json, title, ["by itself s", "lock-step s", "ratio"], [".2f"] * 3, rounds, [floor]
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line_of_calls(__doc__, trajectories=128, seconds=0.3)
    parser.add_argument(
        "--calls", type=int, default=4, help="calls of every second trajectory (default: %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse())
