#!/usr/bin/env python3
"""A race: TRL's GRPOTrainer and Hotbunk from the same model on the same task, in turns of some steps each.

    bash scripts/results/run.sh start                  # makes the model and the data, once
    python scripts/bench/race.py [--seeds 0 1 2] [--steps 30] [--segment 15] [--every 3] [--rows 32] [--json FILE]

Equal are model, rows, reward, prompts and answers a step, learning rate, AdamW's settings, clipping, precision
(float32), the absence of a penalty by KL, the number of steps and the two cores. What is not equal is printed below
the table. The clock runs during steps alone: starts, checkpoints and evaluations, which both do greedily with the
same problems, are left out. A side that is stopped goes on from its checkpoint in its next turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import psutil
from common import command_line, median, save, show

from trainer.run.records import Rows, read_rows, series, write_whole

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "scripts/results/recipe.yaml"
START = Path("runs/results/start")
FOLDER = Path("runs/results")
PROMPTS, GROUP, MAX_TOKENS, RATE, CLIP, BETAS, EPSILON = 16, 8, 192, 5e-5, 0.2, (0.9, 0.99), 1e-8
UNEQUAL = [
    "not equal: Hotbunk's answers come from vLLM, TRL's from Transformers' generate, sampled with other noise",
    "not equal: the order of the rows, and a group's standard deviation, which is the unbiased one in TRL",
    "not equal: Hotbunk has two ranks with one thread each, TRL one process with two threads",
    "TRL pads its micro-batches; Hotbunk packs them, and computes a prompt once for all its answers",
]


class Memory(threading.Thread):
    """Samples the proportional set size of a process and its descendants until it is stopped."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = process, 0, threading.Event()

    def run(self) -> None:
        """Sample twice a second."""
        while not self.ended.wait(0.5):
            total = 0
            try:
                for one in [
                    psutil.Process(self.process),
                    *psutil.Process(self.process).children(recursive=True),
                ]:
                    total += one.memory_full_info().pss
            except psutil.Error:
                continue
            self.peak = max(self.peak, total)


def run(command: list[str], **environment: str) -> int:
    """Run a command and return its peak of memory in bytes; end the bench if the command fails."""
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment) as process:
        memory = Memory(process.pid)
        memory.start()
        code = process.wait()
        memory.ended.set()
        memory.join()
    if code:
        sys.exit(f"race: {' '.join(command[:4])} … ended with exit code {code}")
    return memory.peak


class Hotbunk:
    """Our side."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed, self.folder = options, seed, FOLDER / f"race_hotbunk-{seed}"

    def advance(self, until: int) -> int:
        """Train up to a step, and return the peak of memory."""
        keys = {
            "run.name": self.folder.name,
            "run.seed": self.seed,
            "run.steps": until,
            "eval.every": self.options.every,
            "batch.prompts_per_step": PROMPTS,
            "algorithm.group_size": GROUP,
            "sampling.max_tokens": MAX_TOKENS,
            "policy.lr": RATE,
            "policy.betas": list(BETAS),
            "policy.eps": EPSILON,
            "algorithm.kl_coef": 0.0,
            "algorithm.clip_low": CLIP,
            "algorithm.clip_high": CLIP,
            "checkpoint.every": self.options.segment,
        }
        overrides = [
            word for key, value in keys.items() for word in (f"--{key}", json.dumps(value).strip('"'))
        ]
        return run(["bash", "scripts/train.sh", RECIPE, *overrides], NPROC_PER_NODE="2")


class Trl:
    """TRL's side: race_trl.py."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.folder = FOLDER / f"race_trl-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "folder": str(self.folder),
            "model": str(START / "model"),
            "train": str(START / "data" / "train.jsonl"),
            "eval": str(START / "data" / "eval.jsonl"),
            "prompts": PROMPTS,
            "group": GROUP,
            "lr": RATE,
            "betas": BETAS,
            "eps": EPSILON,
            "rows": options.rows,
            "max_tokens": MAX_TOKENS,
            "clip": CLIP,
            "every": options.every,
            "seed": seed,
        }
        write_whole(self.folder / "settings.json", json.dumps(settings))

    def advance(self, until: int) -> int:
        """Train up to a step, and return the peak of memory."""
        command = [
            sys.executable,
            "scripts/bench/race_trl.py",
            str(self.folder / "settings.json"),
            str(until),
        ]
        return run(command, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))), PYTHONPATH=str(ROOT))


SIDES: dict[str, type[Hotbunk] | type[Trl]] = {"Hotbunk": Hotbunk, "TRL": Trl}


def done(folder: Path) -> int:
    """Return the step that a side has reached."""
    rows = read_rows(folder / "metrics.jsonl")
    return int(rows[-1]["train/step"]) if rows else 0


def race(options: argparse.Namespace, seed: int) -> dict[str, int]:
    """Train both sides in turns, and return their peaks of memory."""
    sides = {name: make(options, seed) for name, make in SIDES.items()}
    peaks = dict.fromkeys(sides, 0)
    for turn, until in enumerate(range(options.segment, options.steps + 1, options.segment)):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            if done(sides[name].folder) < until:
                peaks[name] = max(peaks[name], sides[name].advance(until))
    return peaks


def minutes(rows: Rows) -> list[tuple[float, float]]:
    """Return minutes of training and held-out accuracy at each evaluation."""
    passed, points = 0.0, []
    for row in rows:
        passed += row.get("time/step", 0.0) / 60
        if "eval/accuracy" in row:
            points.append((passed, row["eval/accuracy"]))
    return points


def main() -> None:
    """Run what is not finished, and print."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--segment", type=int, default=15, help="steps of a turn")
    parser.add_argument("--every", type=int, default=3, help="steps between evaluations")
    parser.add_argument("--rows", type=int, default=32, help="answers in one of TRL's micro-batches")
    options = parser.parse_args()
    if options.steps % options.segment or options.segment % options.every:
        parser.error("--steps must be a multiple of --segment, and --segment of --every")
    if not (START / "model" / "config.json").exists():
        parser.error(
            f"there is no model in {START / 'model'}: bash scripts/results/run.sh start makes it"
        )
    peaks = {seed: race(options, seed) for seed in options.seeds}
    report(options, peaks)


def line(name: str, folder: Path, peak: int) -> list[str]:
    """Return a side's row of the table."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "time/step" in row]
    points = minutes(read_rows(folder / "metrics.jsonl"))
    took = {
        key: median(series(rows, f"time/{key}")[1])
        for key in ("step", "rollout", "update", "sync")
        if f"time/{key}" in rows[0]
    }
    tokens = median(series(rows, "rollout_tokens")[1])
    return [
        name,
        f"{points[0][1]:.3f}",
        f"{points[-1][1]:.3f}",
        f"{points[-1][0]:.2f}",
        f"{took['step']:.2f} s",
        f"{took['rollout']:.2f} s",
        f"{tokens / took['rollout']:.0f}",
        f"{took['update']:.2f} s",
        f"{tokens / took['update']:.0f}",
        f"{took.get('sync', 0.0):.3f} s",
        f"{peak / 2**30:.2f} GiB" if peak else "-",
    ]


def report(options: argparse.Namespace, peaks: dict[int, dict[str, int]]) -> None:
    """Print a row for each side and seed, and when Hotbunk had TRL's final accuracy."""
    lines, notes, results = [], [], {}
    for seed in options.seeds:
        folders = {name: FOLDER / f"race_{name.lower()}-{seed}" for name in SIDES}
        lines += [
            line(f"{name}, seed {seed}", folder, peaks[seed][name]) for name, folder in folders.items()
        ]
        points = {name: minutes(read_rows(folder / "metrics.jsonl")) for name, folder in folders.items()}
        results[seed] = points
        end, goal = points["TRL"][-1]
        reached = next((passed for passed, accuracy in points["Hotbunk"] if accuracy >= goal), None)
        notes.append(
            f"seed {seed}: TRL's final accuracy of {goal:.3f} after {end:.2f} minutes; Hotbunk "
            + (
                f"had it after {reached:.2f}, {reached / end:.2f} x"
                if reached
                else f"ended at {points['Hotbunk'][-1][1]:.3f}"
            )
        )
    ends = {name: [results[seed][name][-1][1] for seed in options.seeds] for name in SIDES}
    for name, accuracies in ends.items():
        notes.append(
            f"{name}: {statistics.fmean(accuracies):.3f} at the end, {min(accuracies):.3f} to {max(accuracies):.3f}"
        )
    show(
        f"{options.steps} steps of {PROMPTS} prompts with {GROUP} answers",
        [
            "",
            "first",
            "last",
            "minutes",
            "a step",
            "rollout",
            "tokens/s",
            "update",
            "tokens/s",
            "sync",
            "peak",
        ],
        lines,
        [*notes, *UNEQUAL],
    )
    save(options.json, {str(seed): points for seed, points in results.items()})


if __name__ == "__main__":
    main()
