#!/usr/bin/env python3
"""Cost of handing the device over, and the memory it leaves behind: ten cycles of training and generating.

    python scripts/bench/shift.py [--preset 10M] [--dtype bfloat16] [--way pull] [--rounds 10] [--json FILE]

A cycle is an optimizer step, the shift to the engine, a few sampled tokens, and the shift back:

    release   the trainer puts away what policy.offload says, by default optimizer state and weights
    wake      the engine takes the memory of its weights, and after the sync that of its KV cache
    sync      weights from the policy into the engine, and their comparison
    sleep     the engine gives everything back
    restore   the trainer has its memory again

Memory, with each side at work (on) and while the other one is (off), is what is resident (CPU), or what the trainer has
allocated and what is in use on the whole device (CUDA). The trainer's peak is that of release, wake and sync.
"""

import argparse
import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import (
    PRESETS,
    TIMEOUT,
    add_model,
    command_line,
    connected_manager,
    median,
    random_policy,
    save,
    show,
    start,
    start_engine,
    this_device,
    timed,
    weight_source,
    write_config,
)
from train_step import Answers, ours

from generation.engine.sampling import SamplingSettings
from sharding.report import SyncSettings
from sharding.transports.pull import Pull
from sharding.wire.staging import resident_bytes
from trainer.run.meters import MemoryMeter

MIB = 2**20
PHASES = {
    "release": ["offload"],
    "wake": ["wake"],
    "sync": ["sync", "verify"],
    "sleep": ["sleep"],
    "restore": ["onload"],
}
"""The table's name of a phase: the phases of `SyncReport.seconds` that it sums."""

SETTLED = 2
"""Cycles after which allocators and caches have what they keep; memory is compared from here on."""


@dataclass
class Cycle:
    """The measurements of one cycle.

    Attributes:
        seconds: the seconds of each phase, and of the optimizer step.
        memory: the bytes of either side, on and off.
    """

    seconds: dict[str, float]
    memory: dict[str, int]


class ShiftBench:
    """One policy and one engine on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, this_device()
        folder = write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype)
        self.leader = start_engine(
            folder, self.device, dtype=options.dtype, plain_cpu_weights=not options.packed
        )
        self.policy = random_policy(folder, options.dtype, self.device, offload=options.offload)
        settings = SyncSettings(options.verify, options.bucket_mib << 20)
        source, way = weight_source(self.policy, options.dtype), None
        if options.way == "pull":
            way = Pull(self.device, source, self.policy.shard_tensors(), [self.policy.optimizer])
        self.manager = connected_manager(source, self.device, settings, self.leader, way)
        self.meter = MemoryMeter(self.device)
        self.step = ours(
            self.policy, Answers.random(4, 256, PRESETS[options.preset][-1]), 4096, packing=True
        )

    def run(self) -> list[Cycle]:
        """Run all cycles; the first one begins with an engine that sleeps."""
        self.manager.sleep()
        gc.collect()
        gc.freeze()  # as the trainer does before its first step
        return [self.cycle() for _ in range(self.options.rounds)]

    def cycle(self) -> Cycle:
        """Run and measure one cycle."""
        step = timed(self.step, self.device)
        with self.meter.phase("peak"):
            self.manager.wake(self.policy)
        self.sample()
        memory = {"trainer peak": int(self.meter.metrics()["memory/trainer_gib_peak"] * 2**30)}
        memory |= {"trainer off": self.trainer_bytes(), "engine on": self.engine_bytes()}
        self.manager.sleep()
        memory |= {"trainer on": self.trainer_bytes(), "engine off": self.engine_bytes()}
        took = self.manager.report.seconds
        seconds = {
            name: sum(took.get(phase, 0.0) for phase in phases) for name, phases in PHASES.items()
        }
        return Cycle({"step": step} | seconds, memory)

    def sample(self) -> None:
        """Sample a few tokens, so that the engine has worked and its KV cache has been touched."""
        sampling = SamplingSettings(max_tokens=64)
        completion = self.leader.engine.complete(
            [1, 2, 3], sampling, seed=0, policy_version=self.policy.version
        )
        self.leader.thread.run(completion, TIMEOUT, "sampling")

    def trainer_bytes(self) -> int:
        """Return the memory that the trainer uses now."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else resident_bytes()

    def engine_bytes(self) -> int:
        """Return the memory that the engine uses now."""
        return self.leader.thread.run(self.leader.engine.memory_bytes(), TIMEOUT, "asking for memory")


def growth(cycles: list[Cycle], side: str) -> float:
    """Return the growth in bytes per cycle, between the medians of both halves of the cycles from `SETTLED` on."""
    values = [cycle.memory[side] for cycle in cycles[SETTLED:]]
    half = len(values) // 2
    return (median(values[-half:]) - median(values[:half])) / (len(values) - half) if half else 0.0


def present(options: argparse.Namespace, cycles: list[Cycle]) -> None:
    """Print the table and write the JSON."""
    sides = list(cycles[0].memory)
    rows = [[str(number), *cells(cycle)] for number, cycle in enumerate(cycles, 1)]
    seconds = {name: median([c.seconds[name] for c in cycles]) for name in cycles[0].seconds}
    memory = {side: int(median([c.memory[side] for c in cycles])) for side in sides}
    rows.append(["median", *cells(Cycle(seconds, memory))])
    slopes = {side: growth(cycles, side) for side in sides}
    layout = "packed" if options.packed else "plain"
    columns = ["cycle", *(f"{name} ms" for name in seconds), *(f"{side} MiB" for side in sides)]
    grown = ", ".join(f"{side} {slope / MIB:+.2f}" for side, slope in slopes.items())
    shift = sum(seconds.values()) - seconds["step"]
    notes = [
        f"growth from cycle {SETTLED + 1} on, in MiB a cycle: {grown}",
        f"all of a shift {shift * 1e3:.1f} ms; policy.offload: {options.offload}, sync.verify: {options.verify}",
        f"sync.way: {options.way}",
    ]
    show(f"{options.preset} {options.dtype}, {layout} weights", columns, rows, notes)
    results: dict[str, Any] = {
        "seconds": [c.seconds for c in cycles],
        "memory": [c.memory for c in cycles],
    }
    save(options.json, results | {"growth": slopes})


def cells(cycle: Cycle) -> list[str]:
    """Format a row: milliseconds, then MiB."""
    times = [f"{seconds * 1e3:.1f}" for seconds in cycle.seconds.values()]
    return times + [f"{nbytes / MIB:.1f}" for nbytes in cycle.memory.values()]


def benchmark(options: argparse.Namespace) -> None:
    """Measure and print."""
    bench = ShiftBench(options)
    try:
        present(options, bench.run())
    finally:
        bench.manager.close()
        bench.leader.engine.close()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, rounds=10)
    add_model(parser, "10M")
    parser.add_argument(
        "--packed", action="store_true", help="CPU: let vLLM pack its weights for oneDNN"
    )
    offload = (
        "policy.offload (default: all; optimizer with --way pull, which reads weights where they lie)"
    )
    parser.add_argument("--offload", choices=["none", "optimizer", "all"], help=offload)
    parser.add_argument(
        "--verify", choices=["off", "sample", "full"], default="sample", help="sync.verify"
    )
    parser.add_argument("--way", choices=["staged", "pull"], default="staged", help="sync.way")
    parser.add_argument(
        "--bucket-mib", type=int, default=64, help="size of a staging buffer (default: 64)"
    )
    options = parser.parse_args()
    if options.way == "pull" and options.offload == "all":
        parser.error("--way pull reads weights where they lie: they cannot be moved by --offload all")
    options.offload = options.offload or ("optimizer" if options.way == "pull" else "all")
    return options


if __name__ == "__main__":
    start(benchmark, parse(), ranks=True)
