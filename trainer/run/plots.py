"""Draws curves.png, an overview of a run, from metrics.jsonl, and comparisons of several runs."""

import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.run.records import Rows, read_rows, series

_INK, _BLUE, _ORANGE, _GREEN, _RED = "#3b4252", "#3b6fb6", "#e08a2b", "#3f9d6b", "#c8504b"
_PHASES = {
    "rollout": _BLUE,
    "sync": "#7fa8d9",
    "sleep": "#b9cde8",
    "wake": "#d9e4f2",
    "offload": "#8fb8a0",
    "onload": "#c3dccb",
    "logprobs": "#f0bd85",
    "update": _ORANGE,
    "eval": _GREEN,
    "checkpoint": "#9a9fab",
}


def plot_curves(folder: Path) -> Path:
    """Draws `folder`/curves.png from `folder`/metrics.jsonl and returns its path. Missing metrics are left out."""
    rows = read_rows(folder / "metrics.jsonl")
    figure = Figure(figsize=(15, 8.6), dpi=110, layout="constrained", facecolor="white")
    panels = (_reward, _gap, _length, _entropy, _gradient, _seconds)
    for axes, draw in zip(figure.subplots(2, 3).flat, panels, strict=True):
        draw(axes, rows)
        _dress(axes)
    path = folder / "curves.png"
    figure.savefig(path)
    return path


def compare(runs: Mapping[str, Rows], window: int = 5) -> Figure:
    """Draws held-out accuracy and reward of several runs, by name; rewards are running means over `window` steps."""
    figure = Figure(figsize=(13, 5.4), dpi=110, layout="constrained", facecolor="white")
    held_out, training = figure.subplots(1, 2)
    held_out.set_title("held-out accuracy")
    training.set_title(f"reward in training, mean over {window} steps" if window > 1 else "reward in training")
    for number, (name, rows) in enumerate(runs.items()):
        _line(held_out, rows, "eval/accuracy", name, f"C{number}", marker="o")
        steps, rewards = series(rows, "reward/mean")
        recent = [rewards[max(0, end - window) : end] for end in range(1, len(rewards) + 1)]
        training.plot(steps, [sum(part) / len(part) for part in recent], color=f"C{number}", label=name, linewidth=1.8)
    for axes in (held_out, training):
        _dress(axes)
    return figure


def _reward(axes: Axes, rows: Rows) -> None:
    axes.set_title("reward")
    if not any("reward/mean" in row or "eval/reward" in row for row in rows):  # of a warm start
        axes.set_title("loss (nats per token)")
        _line(axes, rows, "loss", "training", _BLUE)
        _line(axes, rows, "eval/loss", "held-out", _GREEN, marker="o")
        return
    steps, mean = series(rows, "reward/mean")
    spread = dict(zip(*series(rows, "reward/std"), strict=True))
    low = [value - spread.get(step, 0.0) for step, value in zip(steps, mean, strict=True)]
    high = [value + spread.get(step, 0.0) for step, value in zip(steps, mean, strict=True)]
    axes.fill_between(steps, low, high, color=_BLUE, alpha=0.12, linewidth=0, label="± std")
    _line(axes, rows, "reward/mean", "training", _BLUE)
    held_out = "accuracy" if any("eval/accuracy" in row for row in rows) else "reward"
    _line(axes, rows, f"eval/{held_out}", f"held-out {held_out}", _GREEN, marker="o")


def _gap(axes: Axes, rows: Rows) -> None:
    axes.set_title("log-probability gap, trainer to engine (nats)")
    for key, label, color in (("max", "max", _RED), ("p95", "95th percentile", _ORANGE), ("mean", "mean", _BLUE)):
        if any(value > 0 for value in series(rows, f"gap/{key}")[1]):
            axes.set_yscale("log")
        _line(axes, rows, f"gap/{key}", label, color)


def _length(axes: Axes, rows: Rows) -> None:
    axes.set_title("response length (tokens)")
    _line(axes, rows, "length/mean", "mean", _BLUE)
    _line(axes, rows, "length/max", "max", "#b9cde8")
    _second_axis(axes, rows, "length/truncated", "share cut off", _RED)


def _entropy(axes: Axes, rows: Rows) -> None:
    axes.set_title("entropy (nats per token)")
    _line(axes, rows, "entropy", "entropy", _BLUE)
    _second_axis(axes, rows, "kl", "KL to the reference", _ORANGE)


def _gradient(axes: Axes, rows: Rows) -> None:
    axes.set_title("gradient norm")
    _line(axes, rows, "grad_norm", "gradient norm", _BLUE)
    _second_axis(axes, rows, "lr", "learning rate", _ORANGE)


def _seconds(axes: Axes, rows: Rows) -> None:
    axes.set_title("seconds per step")
    steps = [row["train/step"] for row in rows]
    present = {phase: color for phase, color in _PHASES.items() if series(rows, f"time/{phase}")[0]}
    layers = [[row.get(f"time/{phase}") or 0.0 for row in rows] for phase in present]
    if layers:
        axes.stackplot(steps, layers, labels=list(present), colors=list(present.values()), linewidth=0, step="mid")
        axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)


def _line(axes: Axes, rows: Rows, key: str, label: str, color: str, marker: str | None = None) -> None:
    steps, values = series(rows, key)
    if steps:
        # A single point needs a marker, since it has no line.
        symbol = marker or ("o" if len(steps) == 1 else None)
        axes.plot(steps, values, color=color, label=label, marker=symbol, markersize=5, linewidth=1.8)


def _second_axis(axes: Axes, rows: Rows, key: str, label: str, color: str) -> None:
    """Draws a metric with another unit on an axis on the right, with an entry in the panel's legend."""
    if not series(rows, key)[0]:
        return
    right = axes.twinx()
    _line(right, rows, key, label, color)
    axes.plot([], [], color=color, label=f"{label} (right)")
    right.tick_params(colors=color, labelsize=9, length=0)
    right.set_ylim(bottom=0)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    right.spines[:].set_visible(False)


def _dress(axes: Axes) -> None:
    axes.set_xlabel("step", color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    axes.grid(color="#e5e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    title = axes.get_title()
    axes.set_title("")  # the centred one; the legend, which must hide no curve, goes between the title and the axes
    pad = 8 + 16 * max(1, math.ceil(len(labels) / 4))
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=pad)
    if handles:
        axes.legend(
            handles, labels, frameon=False, fontsize=9, labelcolor=_INK, ncols=4, loc="lower left",
            bbox_to_anchor=(-0.02, 0.995), columnspacing=1.2, handlelength=1.2, borderpad=0.2,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", color="#9a9fab", transform=axes.transAxes)
