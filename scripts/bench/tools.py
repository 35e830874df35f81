#!/usr/bin/env python3
"""Cost of waiting for tools: trajectories that each call a slow tool once, against those whose tool is instant.

    python scripts/bench/tools.py [--trajectories 64] [--seconds 0.5] [--json FILE]

instant   each trajectory answers, has its call run, answers again; the tool returns at once
slow      the same prompts, seeds and tokens; the tool sleeps, half of the calls in threads, half on the event loop

If calls ran one after the other, they would take trajectories x seconds longer. If all trajectories waited for the
slowest call of a turn, nothing would be sampled meanwhile. The model is untrained and its ids are random, so the calls
are made up.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import command_line, show_rounds, start, start_engine, this_device
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from generation.engine.engine import Engine
from generation.engine.sampling import SamplingSettings
from generation.rollouts.agent import Agent, tool_rollout
from generation.rollouts.episode import RolloutFunction
from generation.rollouts.episodes import EpisodeSetup, RolloutSettings, rollout
from generation.rollouts.tools import ToolCall, ToolLimits, ToolRunner, make_tool, tools_by_name
from generation.trajectory import Trajectory
from trainer.commands.tiny_model import make_tiny_model

Comparison = Callable[
    [Engine, PreTrainedTokenizerBase, argparse.Namespace], Coroutine[Any, Any, list[list[float]]]
]
"""(engine, its tokenizer, options) -> a row for each round."""


def make_agent(tokenizer: PreTrainedTokenizerBase, seconds: float) -> Agent:
    """Make an agent that calls one of two tools after the first answer, and none after the second."""

    def blocking() -> str:
        """Sleeps on a thread."""
        time.sleep(seconds)
        return "ok"

    async def waiting() -> str:
        """Sleeps on the event loop."""
        await asyncio.sleep(seconds)
        return "ok"

    runner = ToolRunner(ToolLimits(max_concurrency=4096), tokenizer)

    def parse(text: str) -> list[ToolCall]:
        return [ToolCall("blocking" if len(text) % 2 else "waiting")]

    return Agent(runner, parse, 2, tools_by_name([make_tool(blocking), make_tool(waiting)]))


async def play(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, function: RolloutFunction, step: int, count: int
) -> tuple[float, list[Trajectory]]:
    """Run a round of `count` trajectories; return its seconds and the finished trajectories."""
    # A sixteenth of all ids ends an answer, so that answers end by themselves, after 16 tokens on average.
    sampling = SamplingSettings(64, stop_token_ids=list(range(10, 28)))
    settings = RolloutSettings(1, sampling, policy_version=0, seed=0, step=step)
    unclaimed = iter(range(count))

    async def score(trajectory: Trajectory) -> None:
        trajectory.reward = 1.0

    await engine.reset_prefix_cache()
    prompts = [[30 + i % 200, *range(40, 72)] for i in range(count)]
    setup = EpisodeSetup(function, tokenizer)
    start = time.perf_counter()
    done = await rollout(engine, prompts, settings, lambda: next(unclaimed, None), score, setup)
    took = time.perf_counter() - start
    if errors := [trajectory.error for trajectory in done if trajectory.error]:
        raise RuntimeError(errors[0])
    return took, done


async def run(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int, pause: float, count: int
) -> tuple[float, int, int]:
    """Run a round; return its seconds, the tokens sampled and the calls made."""
    took, done = await play(engine, tokenizer, tool_rollout(make_agent(tokenizer, pause)), step, count)
    return (
        took,
        sum(sum(t.loss_mask) for t in done),
        int(sum(t.metrics.get("tools/calls", 0) for t in done)),
    )


async def compare(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[list[float]]:
    """Return the seconds of both ways, their difference and the calls of every round except the first."""
    rows = []
    for step in range(options.rounds + 1):
        instant, tokens, calls = await run(engine, tokenizer, step, 0.0, options.trajectories)
        slow, same_tokens, same_calls = await run(
            engine, tokenizer, step, options.seconds, options.trajectories
        )
        if (tokens, calls) != (same_tokens, same_calls):
            raise RuntimeError(
                f"{tokens} tokens and {calls} calls, then {same_tokens} and {same_calls}: not the same"
            )
        rows.append([instant, slow, slow - instant, float(calls)])
    return rows[1:]


def measure(options: argparse.Namespace, compare: Comparison, max_model_len: int) -> list[list[float]]:
    """Run a comparison with an engine of a tiny model and its tokenizer; return the rows of all rounds."""
    folder = make_tiny_model(Path(tempfile.mkdtemp()) / "model")
    leader = start_engine(
        folder,
        this_device(),
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_bytes=256 << 20,
        plain_cpu_weights=True,
        sleep=False,
    )
    try:
        leader.engine.state.adopt_checkpoint(0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return leader.thread.run(compare(leader.engine, tokenizer, options), 3600, "the benchmark")
    finally:
        leader.close()


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    title = f"{options.trajectories} trajectories, one call of {options.seconds:g} s each"
    columns = ["instant s", "slow s", "difference s", "calls"]
    serial = f"one call after the other would be {options.trajectories * options.seconds:g} s more"
    rounds = measure(options, compare, max_model_len=256)
    show_rounds(options.json, title, columns, (".2f", ".2f", ".2f", ".0f"), rounds, [serial])


def command_line_of_calls(
    description: str | None, trajectories: int, seconds: float
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark with slow tools, with these defaults."""
    parser = command_line(description, rounds=3)
    parser.add_argument(
        "--trajectories",
        type=int,
        default=trajectories,
        help="how many run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="how long a call takes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        help="sequences the engine runs at once (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    start(benchmark, command_line_of_calls(__doc__, trajectories=64, seconds=0.5).parse_args())
