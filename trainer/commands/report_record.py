"""A run's folder, read, and what it tells: how far it came, its figures, remarks, time and memory."""

import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from trainer.config.recipe import masked
from trainer.errors import UserError
from trainer.run.records import Rows, read_rows, series
from trainer.run.screen import duration, sparkline

_FIGURES = ("reward/mean", "eval/accuracy", "loss", "eval/loss", "length/mean", "entropy", "grad_norm", "kl")
_NAMED = re.compile(r"eval/(.+/)?(accuracy|pass@\d+|majority@\d+)")
_COUNTS = {
    "skipped_steps": "updates skipped, their loss or gradient not finite",
    "no_signal_steps": "steps without an update, all answers of each group being equally good or filtered",
    "rollout/failed": "episodes that failed",
    "reward/errors": "answers on which a reward function failed",
}


@dataclass(frozen=True)
class Record:
    """A run's folder, read."""

    folder: Path
    rows: Rows  # of metrics.jsonl
    answers: Rows  # of completions.jsonl
    tokens: Rows  # of tokens.jsonl
    recipe: dict[str, Any]  # config.yaml without secrets; empty where there is none
    written: datetime  # when the last row was

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name


def read_record(folder: Path, begun: bool = True) -> Record:
    """Everything the page is made of.

    Raises UserError if the folder is not a run's, or the run has no step yet and is to have `begun`.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{folder} holds no metrics.jsonl, so it is not a run's folder")
    if not (rows := read_rows(metrics)) and begun:
        raise UserError(f"{metrics} holds no step yet: there is nothing to report")
    file, loaded = folder / "config.yaml", None
    with suppress(yaml.YAMLError):  # incomplete, as older runs left some
        loaded = yaml.safe_load(file.read_bytes()) if file.is_file() else None
    sections = loaded.items() if isinstance(loaded, dict) else ()
    recipe = masked({name: keys for name, keys in sections if isinstance(keys, dict)})
    written = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    answers, tokens = (read_rows(folder / f"{name}.jsonl") for name in ("completions", "tokens"))
    return Record(folder, rows, answers, tokens, recipe, written)


def state(record: Record) -> str:
    """How far the run has come, in a sentence."""
    if not record.rows:
        return "No step is done yet."
    last, wanted = record.rows[-1]["train/step"], record.recipe.get("run", {}).get("steps")
    when = f"{record.written:%Y-%m-%d %H:%M} UTC"
    spent = duration(sum(series(record.rows, "time/step")[1]) or sum(series(record.rows, "time/update")[1]))
    if wanted is None or last >= wanted:
        return f"{last} steps in {spent}, the last of them at {when}."
    return f"Not finished: {last} of {wanted} steps in {spent}, the last of them at {when}."


def figures(rows: Rows) -> Iterator[Sequence[str]]:
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


def remarks(rows: Rows) -> Iterator[str]:
    """Remarks on whether the figures can be believed, and on failures during the run."""
    what = "log-probability gap between trainer and engine"
    steps, gaps = series(rows, "gap/max")
    if gaps:
        worst, mean = max(gaps), statistics.fmean(series(rows, "gap/mean")[1])
        yield f"{what}: at most {worst:.1e} nats (step {steps[gaps.index(worst)]}), {mean:.1e} in the mean"
    trained = [row for row in rows if "reward/mean" in row]
    if bad := [row["train/step"] for row in trained if "gap/max" in row and row["gap/max"] is None]:
        yield f"{what}: not finite in {len(bad)} steps, first in step {bad[0]}"
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
            kinds = sorted({name for row in rows for name in row if name.startswith(f"{key}/")})
            single = [f"{name.removeprefix(f'{key}/')} {sum(series(rows, name)[1]):.0f}" for name in kinds]
            yield f"{total:.0f} {meaning}" + (f" ({', '.join(single)})" if single else "")
    if shares := series(rows, "eval/misjudged")[1]:
        yield f"held-out answers taken for wrong since a reward function failed: {max(shares):.1%} at most"


def phases(rows: Rows) -> Iterator[Sequence[str]]:
    """Seconds of each phase over the run; evaluations and checkpoints are not part of a step's own time."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("time/") and key != "time/step")
    spent = {key: series(rows, key) for key in names}
    everything = sum(sum(values) for _, values in spent.values()) or 1.0
    for key, (steps, values) in sorted(spent.items(), key=lambda item: -sum(item[1][1])):
        if values:
            spent_here, longest = sum(values), max(values)
            usual, most = f"{statistics.median(values):.3g} s", f"{longest:.3g} s (step {steps[values.index(longest)]})"
            yield key.removeprefix("time/"), duration(spent_here), f"{spent_here / everything:.1%}", usual, most


def memory(rows: Rows) -> Iterator[Sequence[str]]:
    """The largest of each side and phase, in GiB."""
    for key in dict.fromkeys(key for row in rows for key in row if re.match("memory/.*_(gib|bytes)", key)):
        name = re.sub("_gib|_bytes", "", key.removeprefix("memory/")).replace("_", " ")
        yield name, f"{max(series(rows, key)[1], default=0.0) / (2**30 if key.endswith('_bytes') else 1):.2f}"
