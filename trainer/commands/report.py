"""`hotbunk report`: what became of a run."""

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.markdown import Markdown

from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run.plots import plot_curves
from trainer.run.records import Rows, read_rows, series
from trainer.run.screen import duration, make_console, sparkline

_RECENT = 64  # answers that the best and the worst are looked for among
_ANSWER_LIMIT = 1200  # characters of one that are shown
_FIGURES = ("reward/mean", "eval/accuracy", "loss", "eval/loss", "length/mean", "entropy", "grad_norm", "kl")
_NAMED = re.compile(r"eval/(.+/)?(accuracy|pass@\d+|majority@\d+)")
_COUNTS = {
    "skipped_steps": "updates skipped, their loss or gradient not finite",
    "no_signal_steps": "steps without an update, all answers of each group being equally good or filtered",
    "rollout/failed": "episodes that failed",
    "reward/errors": "calls of reward functions that failed",
}


@dataclass(frozen=True)
class Record:
    """A run's folder, read."""

    folder: Path
    rows: Rows  # of metrics.jsonl
    answers: Rows  # of completions.jsonl
    recipe: dict[str, Any]  # config.yaml; empty where there is none, as of a warm start
    written: datetime  # when the last row was


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.description = (
        "Write parser.md and curves.png to a run's folder, whether it is finished or not, and show them."
    )
    parser.add_argument("run", type=Path, help="folder of a run")


def main(arguments: argparse.Namespace) -> int:
    """Write report.md and curves.png to the run's folder, and show the report."""
    record = read_record(arguments.run)
    plot_curves(record.folder)
    text = render(record)
    path = record.folder / "report.md"
    path.write_text(text)
    console = make_console()
    console.print(Markdown(text))
    console.print(f"\n{path}", soft_wrap=True)
    return 0


def read_record(folder: Path) -> Record:
    """Everything the report is made of. Raises UserError if the folder is not a run's, or the run has no step yet."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{folder} holds no metrics.jsonl, so it is not a run's folder")
    if not (rows := read_rows(metrics)):
        raise UserError(f"{metrics} holds no step yet: there is nothing to report")
    file, loaded = folder / "config.yaml", None
    with suppress(yaml.YAMLError):  # incomplete, as older runs left some
        loaded = yaml.safe_load(file.read_bytes()) if file.is_file() else None
    sections = loaded.items() if isinstance(loaded, dict) else ()
    recipe = {name: keys for name, keys in sections if isinstance(keys, dict)}
    written = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    return Record(folder, rows, read_rows(folder / "completions.jsonl"), recipe, written)


def render(record: Record) -> str:
    """The whole report."""
    parts = [
        f"# {record.folder.resolve().name}",
        _state(record),
        "![reward, gap, lengths, entropy, gradient norm and seconds of each step](curves.png)",
        *_section("Figures", _table(("", "first", "best", "last", ""), _figures(record.rows))),
        *_section("To look at", "\n".join(f"- {line}" for line in _remarks(record.rows))),
        *_section("Time", _table(("phase", "total", "share", "median", "longest"), _phases(record.rows))),
        *_section("Memory", _table(("", "largest, GiB"), _memory(record.rows))),
        *_section("Answers", "\n\n".join(_answers(record.answers))),
        *_section("Recipe, where it is not the default", _recipe(record.recipe)),
    ]
    return "\n\n".join(parts) + "\n"


def _state(record: Record) -> str:
    last, wanted = record.rows[-1]["train/step"], record.recipe.get("run", {}).get("steps")
    when = f"{record.written:%Y-%m-%d %H:%M} UTC"
    spent = duration(sum(series(record.rows, "time/step")[1]) or sum(series(record.rows, "time/update")[1]))
    if wanted is None or last >= wanted:
        return f"{last} steps in {spent}, the last of them at {when}."
    return f"**Not finished:** {last} of {wanted} steps in {spent}, the last of them at {when}."


def _figures(rows: Rows) -> Iterator[Sequence[str]]:
    """A line for each figure that the run has: at its first, its best and its last step, and a curve."""
    named = sorted({key for row in rows for key in row if _NAMED.fullmatch(key)})
    for key in dict.fromkeys([*_FIGURES[:2], *named, *_FIGURES[2:]]):
        steps, values = series(rows, key)
        if not values:
            continue
        best = ""
        if key == "reward/mean" or key in named:  # for the others, it is unclear which direction is better
            best = f"{max(values):.4g} (step {steps[values.index(max(values))]})"
        yield key, f"{values[0]:.4g}", best, f"{values[-1]:.4g}", sparkline(values, 30)


def _remarks(rows: Rows) -> Iterator[str]:
    """Remarks on whether the figures can be believed, and on failures during the run."""
    what = "log-probability gap between trainer and engine"
    steps, gaps = series(rows, "gap/max")
    if gaps:
        worst, mean = max(gaps), statistics.fmean(series(rows, "gap/mean")[1])
        yield f"{what}: at most {worst:.1e} nats (step {steps[gaps.index(worst)]}), {mean:.1e} in the mean"
    trained = [row for row in rows if "reward/mean" in row]
    if bad := [row["train/step"] for row in trained if "gap/max" in row and row["gap/max"] is None]:
        yield f"{what}: **not finite** in {len(bad)} steps, first in step {bad[0]}"
    if missing := sum("gap/max" not in row for row in trained):
        yield f"{what}: not measured in {missing} of {len(trained)} steps"
    if old := series(rows, "stale/share")[1]:
        ages, oldest = series(rows, "stale/age_mean")[1], max(series(rows, "stale/age_max")[1])
        began = f"answers began {statistics.fmean(ages):.2g} steps before on average, at most {oldest:.0f}"
        weights = series(rows, "correction/effective")[1]
        size = f"; effective sample size at least {min(weights):.0%}" if weights else ""
        yield f"tokens of earlier versions: {statistics.fmean(old):.0%}; {began}{size}"
    if cut := series(rows, "length/truncated")[1]:
        yield f"answers cut off at their longest: {cut[0]:.0%} at first, {cut[-1]:.0%} at last, {max(cut):.0%} at most"
    for key, meaning in _COUNTS.items():
        if total := sum(series(rows, key)[1]):
            yield f"{total:.0f} {meaning}"


def _phases(rows: Rows) -> Iterator[Sequence[str]]:
    """Seconds of each phase over the run; evaluations and checkpoints are not part of a step's own time."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("time/") and key != "time/step")
    spent = {key: series(rows, key) for key in names}
    everything = sum(sum(values) for _, values in spent.values())
    for key, (steps, values) in sorted(spent.items(), key=lambda item: -sum(item[1][1])):
        longest = max(values)
        yield (
            key.removeprefix("time/"),
            duration(sum(values)),
            f"{sum(values) / everything:.1%}",
            f"{statistics.median(values):.3g} s",
            f"{longest:.3g} s (step {steps[values.index(longest)]})",
        )


def _memory(rows: Rows) -> Iterator[Sequence[str]]:
    for key in dict.fromkeys(key for row in rows for key in row if re.match("memory/.*_(gib|bytes)", key)):
        name = re.sub("_gib|_bytes", "", key.removeprefix("memory/")).replace("_", " ")
        yield name, f"{max(series(rows, key)[1]) / (2**30 if key.endswith('_bytes') else 1):.2f}"


def _answers(answers: Rows) -> Iterator[str]:
    """The two best and the two worst of the latest answers, each text once."""
    latest = {(row.get("prompt"), row.get("text")): row for row in answers[-_RECENT:]}.values()
    ranked = sorted(latest, key=lambda row: -(row.get("reward") or 0.0))
    for row in ranked if len(ranked) < 4 else [*ranked[:2], *ranked[-2:]]:
        expected = "" if row.get("answer") is None else f"; expected: {str(row['answer'])[:100]!r}"
        yield f"Reward {row.get('reward')}, step {row.get('train/step')}, end: {row.get('finish_reason')}{expected}"
        yield _fenced(f"{row.get('prompt', '')}{row.get('text', '')}"[:_ANSWER_LIMIT])


def _fenced(text: str) -> str:
    """A code block that nothing in the text can end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _recipe(recipe: dict[str, Any]) -> str:
    if not recipe:
        return ""
    required = {"model": {"path": "-"}, "data": {"path": "-"}}
    default = TrainConfig.model_validate(required).model_dump(mode="json")
    changed = {}
    for section, keys in recipe.items():
        if kept := {key: value for key, value in keys.items() if value != default.get(section, {}).get(key)}:
            changed[section] = kept
    return _fenced(yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).rstrip()).replace("text", "yaml", 1)


def _section(title: str, body: str) -> list[str]:
    """A heading and what is below it; neither, where there is nothing."""
    return [f"## {title}", body] if body else []


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [list(row) for row in rows]
    if not lines:
        return ""
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [titles, rule, *lines])
