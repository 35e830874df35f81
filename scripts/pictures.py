#!/usr/bin/env python3
"""Draw the pictures of docs/pictures/ from files of real runs, or make such a file.

    .venv/bin/python scripts/pictures.py                                      # draws all pictures
    .venv/bin/python scripts/pictures.py NAME RUN_DIR                         # saves a run's figures as NAME.json
    .venv/bin/python scripts/pictures.py NAME RECIPE [--section.key value …]  # trains; saves processes and memory, too

Memory is the proportional set size (PSS), in which a page that several processes map is divided among them. `step.json`
is from a run of two ranks on a model of 32M parameters (`scripts/make_tiny.py --hidden-size 512 --intermediate-size
2048 --layers 8 --heads 8 --kv-heads 4`), with `sync.way: staged`.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.config.recipe import load_config
from trainer.run.records import read_rows

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
INTERVAL_S = 0.03
KEPT = ("train/step", "reward/mean", "eval/accuracy", "gap/max", "entropy", "time/")
INK, GRID, BLUE, ORANGE, GREY = "#3b4252", "#e5e8ee", "#3b6fb6", "#e08a2b", "#9a9fab"
PARTS = {"trainer": ["rank"], "engine": ["engine core", "engine worker"]}
COLORS = {"trainer": ORANGE, "engine": BLUE}
LABELS = {"trainer": "ranks: policy, optimizer, gradients", "engine": "engines: weights, KV cache"}
MEANINGS = {
    "launcher": "torchrun's agent; one on each machine",
    "guardian": "cleans up after the process below it, and after the other guardian",
    "rank": "trains a shard of the policy; the leader of an engine also runs rollouts",
    "fork server": "a copy of the rank that has imported vLLM (CPU only)",
    "engine core": "vLLM: scheduler, and on one rank the model as well",
    "engine worker": "vLLM: the model, one for each rank of a tensor-parallel engine",
    "reward watcher": "ends a reward worker that takes too long",
    "reward worker": "calls the reward functions",
    "resource tracker": "a helper of Python's multiprocessing",
}
STEP = {"wake": "#d9e4f2", "sync": "#7fa8d9", "rollout": BLUE, "sleep": "#b9cde8", "update": ORANGE}
"""The phases of a step in their order, with their colours."""


def role(process: psutil.Process) -> str:
    """Return the part that a process has in a run, by its command line."""
    line = " ".join(process.cmdline())
    marks = {
        "guardian.py": "guardian",
        "VLLM::Worker": "engine worker",
        "VLLM::EngineCore": "engine core",
        "forkserver": "fork server",
        "resource_tracker": "resource tracker",
        "spawn_main": "reward watcher" if process.children() else "reward worker",
        "trainer.launcher": "launcher",
        "-m hotbunk": "launcher",
        "trainer": "rank",
    }
    return next((name for mark, name in marks.items() if mark in line), process.name())


def tree(process: psutil.Process) -> dict[str, Any]:
    """Return the role of a process, and the trees of its children in the order of their start."""
    return {"role": role(process), "children": [tree(child) for child in process.children()]}


def memory_mib(process: psutil.Process) -> float:
    """Return the proportional set size of a process in MiB."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[0]) / 1024


def train(recipe: str, *overrides: str) -> dict[str, Any]:
    """Run a recipe. Return its figures, the tree of its processes and samples of their memory."""
    words = [word.removeprefix("--") for word in overrides]
    config = load_config(
        Path(recipe), [f"{key}={value}" for key, value in zip(words[::2], words[1::2], strict=True)]
    )
    metrics = config.run.folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run = subprocess.Popen(
        [sys.executable, "-m", "hotbunk", "train", recipe, *overrides, "--resume", "none"]
    )
    written: list[float] = []
    samples: list[dict[str, float]] = []
    processes: dict[str, list[psutil.Process]] = {}
    largest: dict[str, Any] = {}
    size = 0
    while run.poll() is None:
        time.sleep(INTERVAL_S)
        steps = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        written += [time.time()] * (steps - len(written))
        with contextlib.suppress(psutil.Error, OSError):
            family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
            if len(family) > size:
                size, largest = len(family), tree(family[0])
                processes = {
                    part: [one for one in family if role(one) in roles] for part, roles in PARTS.items()
                }
            samples.append(
                {part: round(sum(map(memory_mib, those)), 1) for part, those in processes.items()}
            )
            samples[-1]["time"] = time.time()
    return {"processes": largest, "memory": samples, "written": written} | figures(config.run.folder)


def figures(run: Path) -> dict[str, Any]:
    """Return the figures of a run's steps that the pictures show."""
    rows = read_rows(run / "metrics.jsonl")
    return {
        "steps": [{key: value for key, value in row.items() if key.startswith(KEPT)} for row in rows]
    }


def read(name: str) -> dict[str, Any]:
    """Return the saved record of a run."""
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return record


def memory() -> Figure:
    """Draw the memory of the ranks and of their engines over two steps, with the steps' phases."""
    record = read("step")
    end = record["written"][-2]
    start = end - sum(record["steps"][index]["time/step"] for index in (-3, -2))
    figure, (axes,) = panels(1, 1, (10, 3.4))
    for index in (-3, -2):
        phases = spans(record["steps"][index])
        left = record["written"][index] - start - sum(duration for _, _, duration in phases)
        for phase, begin, duration in phases:
            axes.axvspan(
                left + begin, left + begin + duration, color=STEP[phase], alpha=0.18, linewidth=0
            )
            if duration > 1:
                axes.text(left + begin + duration / 2, 3.25, phase, ha="center", fontsize=9, color=INK)
    samples = [sample for sample in record["memory"] if start <= sample["time"] <= end]
    times = [sample["time"] - start for sample in samples]
    for part, color in (("trainer", ORANGE), ("engine", BLUE)):
        axes.plot(
            times,
            [sample[part] / 1024 for sample in samples],
            color=color,
            label=LABELS[part],
            linewidth=2,
        )
    axes.set_ylim(0, 3.5)
    axes.set_xlim(0, end - start)
    axes.set_title("memory (GiB)")
    axes.set_xlabel("seconds", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.9))
    return figure


def step() -> Figure:
    """Draw the timeline of a step: what is in memory in each phase."""
    phases = spans(read("step")["steps"][-2])
    begins = {phase: begin for phase, begin, _ in phases}
    ends = {phase: begin + duration for phase, begin, duration in phases}
    end = ends["update"]
    lanes = (
        ("policy: masters and AdamW's moments", 0.0, end, ORANGE),
        ("engine: weights", begins["wake"], ends["sleep"], BLUE),
        ("staging buffers", begins["sync"], ends["sync"], GREY),
        ("engine: KV cache", begins["rollout"], ends["sleep"], BLUE),
        ("policy: gradients and activations", begins["update"], end, ORANGE),
    )
    figure, (axes,) = panels(1, 1, (10, 3.0))
    for row, (label, begin, stop, color) in enumerate(reversed(lanes)):
        axes.barh(row, stop - begin, left=begin, height=0.55, color=color, zorder=3)
        axes.text(-0.1, row, label, ha="right", va="center", fontsize=9, color=INK)
    for phase, begin, duration in phases:
        axes.axvspan(begin, begin + duration, color=STEP[phase], alpha=0.18, linewidth=0)
        if duration > 0.15:
            axes.text(begin + duration / 2, len(lanes) - 0.4, phase, ha="center", fontsize=9, color=INK)
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(lanes))
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds", fontsize=9)
    return figure


def spans(row: dict[str, float]) -> list[tuple[str, float, float]]:
    """Return each phase of a step with its start and duration in seconds; moving memory counts as waking."""
    seconds = {phase: row[f"time/{phase}"] for phase in STEP}
    seconds["wake"] += row["time/step"] - sum(seconds.values())
    begins = [sum(list(seconds.values())[:place]) for place in range(len(seconds))]
    return list(zip(seconds, begins, seconds.values(), strict=True))


def processes() -> Figure:
    """Draw the tree of the processes of a run on two ranks, without those of the second rank."""
    launcher = read("step")["processes"]
    lines = list(outline({**launcher, "children": launcher["children"][:1]}))
    figure = Figure(figsize=(10, 0.34 * len(lines) + 0.4), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10)
    axes.set_ylim(len(lines) + 0.2, -0.8)
    axes.set_axis_off()
    for place, (depth, parent, name) in enumerate(lines):
        left = 0.3 + 0.55 * depth
        color = next((COLORS[part] for part, roles in PARTS.items() if name in roles), GREY)
        axes.text(
            left,
            place,
            name,
            va="center",
            fontsize=10,
            color="white",
            bbox={"facecolor": color, "edgecolor": "none"},
        )
        axes.text(4.6, place, MEANINGS.get(name, ""), va="center", fontsize=10, color=INK)
        if parent is not None:
            x = 0.3 + 0.55 * (depth - 1) + 0.1
            axes.plot([x, x, left - 0.1], [parent + 0.35, place, place], color=GREY, linewidth=1)
    return figure


def outline(
    node: dict[str, Any], depth: int = 0, parent: int | None = None, place: int = 0
) -> Iterator[tuple[int, int | None, str]]:
    """Yield the depth, the parent's place and the role of each process. Of equal subtrees, only one is included."""
    yield depth, parent, node["role"]
    last = place
    different = {json.dumps(child): child for child in node["children"]}
    for child in different.values():
        lines = list(outline(child, depth + 1, place, last + 1))
        yield from lines
        last += len(lines)


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a white figure and its axes, which have a light grid."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one in axes:
        one.grid(color=GRID, linewidth=0.8)
        one.set_axisbelow(True)
        one.spines[:].set_visible(False)
        one.tick_params(colors=INK, labelsize=9, length=0)
        one.title.set(fontsize=11, color=INK)
    return figure, axes


PICTURES = {"step": step, "memory": memory, "processes": processes}


def draw(folder: Path) -> None:
    """Draw all pictures into a folder."""
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "hotbunk", "font.family": "sans-serif"}
    ):
        for name, picture in PICTURES.items():
            picture().savefig(folder / f"{name}.svg", metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Draw the pictures, or save the figures of a run."""
    if not arguments:
        draw(FOLDER)
        return
    name, source, *overrides = arguments
    record = figures(Path(source)) if Path(source).is_dir() else train(source, *overrides)
    (FOLDER / f"{name}.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
