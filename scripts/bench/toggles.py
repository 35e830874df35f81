#!/usr/bin/env python3
"""An engine's toggles: eager against compiled, and with CUDA graphs; with vLLM's own all-reduce and without.

    python scripts/bench/toggles.py [--preset 10M] [--tensor-parallel-size 1] [--json FILE]

eager             engine.enforce_eager: true, the default on CPU
graphs            false, the default on CUDA: compiled, and on CUDA recorded as graphs
graphs, NCCL's    as graphs, with engine.extra.disable_custom_all_reduce: true; only with several ranks on CUDA

Each has an engine of its own, which samples the same batch in every round. The start includes the first batch, during
which vLLM still compiles.
"""

import argparse
import os
import random
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import (
    PRESETS,
    add_engine,
    add_model,
    command_line,
    engine_for,
    median,
    save,
    show,
    start,
    this_device,
)
from rollout import bare

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episodes import RolloutSettings


def ways(ranks: int, on_cuda: bool) -> dict[str, dict[str, Any]]:
    """Return the engine's settings of each way that is possible on this device, by name."""
    settings: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "graphs": {"enforce_eager": False},
    }
    if on_cuda and ranks > 1:
        settings["graphs, NCCL's"] = settings["graphs"] | {"extra": {"disable_custom_all_reduce": True}}
    return settings


def measure(options: argparse.Namespace, settings: dict[str, Any]) -> list[float]:
    """Return the seconds until the first batch is sampled, and then the tokens per second of each round."""
    choice, vocabulary = random.Random(0), range(PRESETS[options.preset][-1])
    prompts = [choice.choices(vocabulary, k=options.prompt_tokens) for _ in range(options.prompts)]
    begun, figures, ranks = time.perf_counter(), list[float](), options.tensor_parallel_size
    if this_device().type == "cuda":
        settings = settings | {"device_indices": tuple(range(ranks))}
    with engine_for(options, tensor_parallel_size=ranks, **settings) as leader:
        for step in range(options.rounds + 1):
            batch = RolloutSettings(
                1, SamplingSettings(options.max_tokens), policy_version=0, seed=0, step=step
            )
            leader.thread.run(leader.engine.reset_prefix_cache(), 60, "emptying the cache")
            now = time.perf_counter()
            sampled = leader.thread.run(bare(leader.engine, prompts, batch), 3600, "a batch")
            end = time.perf_counter()
            figures.append(sum(map(len, sampled.values())) / (end - now) if step else end - begun)
    return figures


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    chosen = ways(options.tensor_parallel_size, this_device().type == "cuda")
    figures = {name: measure(options, settings) for name, settings in chosen.items()}
    plain = median(figures["eager"][1:])
    rows = [
        [name, f"{first:.1f}", f"{median(rest):.0f}", f"{median(rest) / plain:.2f}"]
        for name, (first, *rest) in figures.items()
    ]
    title = f"{options.preset} {options.dtype}: {options.prompts} prompts, up to {options.max_tokens} tokens each"
    show(
        title,
        ["engine", "start s", "tok/s", "against eager"],
        rows,
        [f"{options.max_num_seqs} sequences at a time"],
    )
    save(options.json, {"title": title, "figures": figures})


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    add_model(parser, "10M")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks of the engine (default: 1)"
    )
    parser.add_argument("--prompts", type=int, default=64, help="prompts in a batch (default: 64)")
    add_engine(parser, prompt_tokens=64, max_tokens=64, max_num_seqs=64)
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse())
