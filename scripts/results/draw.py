"""Draw the pictures of docs/results.md from docs/results/, and print its table.

python -m scripts.results.draw
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.results.run import FIGURES
from trainer.run.records import Rows, read_rows, series

SIDES = {"race_hotbunk": "Hotbunk", "race_trl": "TRL"}
"""The sides of the race, by the names of their files."""
PANELS = {
    "algorithms": ["grpo", "dr_grpo", "rloo", "ppo"],
    "precision of the engine": ["grpo", "bfloat16", "bfloat16_uncorrected"],
    "who samples when": ["grpo", "slices", "apart"],
}
"""The settings in each panel."""


def runs(setting: str, folder: Path = FIGURES) -> list[Rows]:
    """Return the rows of each seed's run of a setting."""
    return [read_rows(path) for path in sorted(folder.glob(f"{setting}-[0-9]*.jsonl"))]


def minutes(rows: Rows) -> list[float]:
    """Return the minutes of training that had passed at each evaluation; evaluations themselves do not count."""
    passed, points = 0.0, []
    for row in rows:
        passed += row.get("time/step", 0.0) / 60
        if "eval/accuracy" in row:
            points.append(passed)
    return points


def band(setting: str, folder: Path = FIGURES) -> Iterator[tuple[float, float, float, float, float]]:
    """Yield step, mean minutes, and least, mean and largest held-out accuracy of the seeds at each evaluation."""
    seeds = runs(setting, folder)
    curves = [series(rows, "eval/accuracy") for rows in seeds]
    clocks = [minutes(rows) for rows in seeds]
    for index, step in enumerate(curves[0][0]):
        accuracies = [curve[1][index] for curve in curves]
        passed = statistics.fmean(clock[index] for clock in clocks)
        yield step, passed, min(accuracies), statistics.fmean(accuracies), max(accuracies)


def draw(
    axes: Axes, setting: str, color: str, over_minutes: bool = False, label: str | None = None
) -> None:
    """Draw the mean of the seeds and their band."""
    steps, passed, least, mean, most = map(list, zip(*band(setting), strict=True))
    places = passed if over_minutes else steps
    axes.plot(places, mean, color=color, linewidth=1.8, label=label or setting)
    axes.fill_between(places, least, most, color=color, alpha=0.18, linewidth=0)


def dress(axes: Axes, x: str, title: str = "") -> None:
    """Labels a panel."""
    axes.set_xlabel(x)
    axes.set_title(title)
    axes.grid(color="#e5e8ee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def curves() -> Figure:
    """Draw held-out accuracy over steps, and below over minutes."""
    figure = Figure(figsize=(13, 7), layout="constrained", facecolor="white")
    rows = figure.subplots(2, len(PANELS), sharey=True)
    for over_minutes, line in enumerate(rows):
        for axes, (title, settings) in zip(line, PANELS.items(), strict=True):
            for number, setting in enumerate(settings):
                draw(axes, setting, f"C{number}", bool(over_minutes))
            dress(axes, "minutes of training" if over_minutes else "step", "" if over_minutes else title)
        line[0].set_ylabel("held-out accuracy")
    return figure


def race() -> Figure:
    """Draw held-out accuracy of both sides of the race over minutes, and over steps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    for over_minutes, axes in zip((True, False), figure.subplots(1, 2, sharey=True), strict=True):
        for number, side in enumerate(SIDES):
            draw(axes, side, f"C{number}", over_minutes, SIDES[side])
        dress(axes, "minutes of training" if over_minutes else "step")
        if over_minutes:  # the left one, whose axis the other shares
            axes.set_ylabel("held-out accuracy")
    return figure


def differences(setting: str, baseline: str = "grpo", folder: Path = FIGURES) -> list[float]:
    """Return each seed's last accuracy minus that of the baseline's seed, which has the same order of rows."""
    pairs = zip(runs(setting, folder), runs(baseline, folder), strict=True)
    return [
        series(rows, "eval/accuracy")[1][-1] - series(base, "eval/accuracy")[1][-1]
        for rows, base in pairs
    ]


def table() -> str:
    """Return the page's table of settings: where each begins and end, and what its steps take."""
    lines = [
        "| setting | step 0 | last step: mean (least to largest) | minus `grpo`, by seed | a step | largest gap |",
        "|---|---|---|---|---|---|",
    ]
    for setting in dict.fromkeys(name for names in PANELS.values() for name in names):
        points, seeds = list(band(setting)), runs(setting)
        seconds = statistics.median(value for rows in seeds for value in series(rows, "time/step")[1])
        gap = max(value for rows in seeds for value in series(rows, "gap/max")[1])
        _, _, least, mean, most = points[-1]
        accuracies = f"{points[0][3]:.3f} | {mean:.3f} ({least:.3f} to {most:.3f})"
        pairs = (
            "–" if setting == "grpo" else ", ".join(f"{value:+.3f}" for value in differences(setting))
        )
        lines.append(f"| `{setting}` | {accuracies} | {pairs} | {seconds:.1f} s | {gap:.1g} |")
    return "\n".join(lines)


def race_table() -> str:
    """Return the page's table of the race: medians of a step's phases, and the time until TRL's final accuracy."""
    lines = [
        "| side, seed | last accuracy | minutes | a step | rollout | update | sync | at TRL's last accuracy |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for hotbunk, trl in zip(*(runs(side) for side in SIDES), strict=True):
        goal = series(trl, "eval/accuracy")[1][-1]
        for name, rows in zip(SIDES.values(), (hotbunk, trl), strict=True):
            accuracies, clock = series(rows, "eval/accuracy")[1], minutes(rows)
            reached = [
                passed for passed, accuracy in zip(clock, accuracies, strict=True) if accuracy >= goal
            ]
            took = {key: series(rows, f"time/{key}")[1] for key in ("step", "rollout", "update", "sync")}
            phases = " | ".join(
                f"{statistics.median(values):.2f} s" if values else "–" for values in took.values()
            )
            lines.append(
                f"| {name}, {(len(lines) - 2) // 2} | {accuracies[-1]:.3f} | {clock[-1]:.2f} | {phases} | "
                + (f"{reached[0]:.2f} minutes |" if reached else "never |")
            )
    return "\n".join(lines)


def draw_all(folder: Path) -> None:
    """Write the pictures."""
    matplotlib.rcParams["svg.hashsalt"] = "results"
    curves().savefig(folder / "curves.svg", metadata={"Date": None})
    race().savefig(folder / "race.svg", metadata={"Date": None})


def main() -> None:
    """Draw and print."""
    draw_all(FIGURES)
    print(table(), race_table(), sep="\n\n")


if __name__ == "__main__":
    main()
