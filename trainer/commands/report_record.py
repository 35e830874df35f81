"""The record of a run, read from its folder, with its state, metrics, remarks, times and memory for
the report.
"""

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

_METRICS = (
    "reward/mean",
    "eval/accuracy",
    "loss",
    "eval/loss",
    "length/mean",
    "entropy",
    "grad_norm",
    "kl",
)
_NAMED = re.compile(r"eval/(.+/)?(accuracy|pass@\d+|majority@\d+)")
_COUNTS = {
    "skipped_steps": "updates skipped, since their loss or gradient was not finite",
    "no_signal_steps": (
        "steps without an update, since all answers of each group were equally good or filtered"
    ),
    "rollout/failed": "episodes that failed",
    "reward/errors": "answers on which a reward function failed",
    "reward/abstained": "answers from which all reward functions abstained",
}


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder."""

    folder: Path
    rows: Rows  # the rows of metrics.jsonl
    answers: Rows  # the rows of completions.jsonl
    tokens: Rows  # the rows of tokens.jsonl
    recipe: dict[str, Any]  # config.yaml without secrets; empty if there is none
    written: datetime  # the time at which the last row was written

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name


def read_record(folder: Path, begun: bool = True) -> RunRecord:
    """Read a run's folder.

    Raises UserError if the folder is not a run's, or, if `begun`, if the run has no step yet.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{folder} has no metrics.jsonl, so it is not a run's folder: name one")
    if not (rows := read_rows(metrics)) and begun:
        raise UserError(
            f"{metrics} has no step yet, so there is nothing to report: wait for the first one"
        )
    file = folder / "config.yaml"
    loaded = None
    with suppress(yaml.YAMLError):  # older runs may have left an incomplete file
        loaded = yaml.safe_load(file.read_bytes()) if file.is_file() else None
    sections = loaded.items() if isinstance(loaded, dict) else ()
    recipe = masked({name: keys for name, keys in sections if isinstance(keys, dict)})
    written = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    answers, tokens = (read_rows(folder / f"{name}.jsonl") for name in ("completions", "tokens"))
    return RunRecord(folder, rows, answers, tokens, recipe, written)


def state(record: RunRecord) -> str:
    """Return a sentence about the run's progress."""
    if not record.rows:
        return "No step is done yet."
    last = record.rows[-1]["train/step"]
    wanted = record.recipe.get("run", {}).get("steps")
    when = f"{record.written:%Y-%m-%d %H:%M} UTC"
    spent = duration(
        sum(series(record.rows, "time/step")[1]) or sum(series(record.rows, "time/update")[1])
    )
    if wanted is None or last >= wanted:
        return f"{last} steps in {spent}, the last of them at {when}."
    return f"Not finished: {last} of {wanted} steps in {spent}, the last of them at {when}."


def metric_lines(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield a line for each metric of the run: its first, best and last value, and a curve."""
    named = sorted({key for row in rows for key in row if _NAMED.fullmatch(key)})
    for key in dict.fromkeys([*_METRICS[:2], *named, *_METRICS[2:]]):
        steps, values = series(rows, key)
        if not values:
            continue
        best = ""
        if key == "reward/mean" or key in named:
            # For the others, it is unclear which direction is better
            best = f"{max(values):.4g} (step {steps[values.index(max(values))]})"
        yield key, f"{values[0]:.4g}", best, f"{values[-1]:.4g}", sparkline(values, 30)


def remarks(rows: Rows) -> Iterator[str]:
    """Yield remarks on how far the metrics can be trusted, and on failures during the run."""
    what = "log-probability gap between trainer and engine"
    steps, gaps = series(rows, "gap/max")
    if gaps:
        worst = max(gaps)
        mean = statistics.fmean(series(rows, "gap/mean")[1])
        step = steps[gaps.index(worst)]
        yield f"{what}: at most {worst:.1e} nats (step {step}), {mean:.1e} on average"
    trained = [row for row in rows if "reward/mean" in row]
    if bad := [row["train/step"] for row in trained if "gap/max" in row and row["gap/max"] is None]:
        yield f"{what}: not finite in {len(bad)} steps, first in step {bad[0]}"
    if missing := sum("gap/max" not in row for row in trained):
        yield f"{what}: not measured in {missing} of {len(trained)} steps"
    if old := series(rows, "stale/share")[1]:
        ages = series(rows, "stale/age_mean")[1]
        oldest = max(series(rows, "stale/age_max")[1])
        began = (
            f"answers began {statistics.fmean(ages):.2g} steps earlier on average, at most {oldest:.0f}"
        )
        weights = series(rows, "correction/effective")[1]
        size = f"; effective sample size at least {min(weights):.0%}" if weights else ""
        yield f"tokens of earlier versions: {statistics.fmean(old):.0%}; {began}{size}"
    if cut := series(rows, "length/truncated")[1]:
        yield (
            f"answers cut off at max_tokens: {cut[0]:.0%} at first, {cut[-1]:.0%} at last, "
            f"{max(cut):.0%} at most"
        )
    for key, meaning in _COUNTS.items():
        if total := sum(series(rows, key)[1]):
            kinds = sorted({name for row in rows for name in row if name.startswith(f"{key}/")})
            single = [
                f"{name.removeprefix(f'{key}/')} {sum(series(rows, name)[1]):.0f}" for name in kinds
            ]
            yield f"{total:.0f} {meaning}" + (f" ({', '.join(single)})" if single else "")
    if shares := series(rows, "eval/misjudged")[1]:
        yield (
            f"held-out answers counted as wrong since a reward function failed: {max(shares):.1%} at "
            "most"
        )


def phases(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the time of each phase over the run; evaluations and checkpoints are phases beside
    those of steps.
    """
    names = dict.fromkeys(
        key for row in rows for key in row if key.startswith("time/") and key != "time/step"
    )
    spent = {key: series(rows, key) for key in names}
    everything = sum(sum(values) for _, values in spent.values()) or 1.0
    for key, (steps, values) in sorted(spent.items(), key=lambda item: -sum(item[1][1])):
        if values:
            spent_here = sum(values)
            longest = max(values)
            usual = _short(statistics.median(values))
            most = f"{_short(longest)} (step {steps[values.index(longest)]})"
            yield (
                key.removeprefix("time/"),
                duration(spent_here),
                f"{spent_here / everything:.1%}",
                usual,
                most,
            )


def _short(seconds: float) -> str:
    """Return a duration with two decimals, in ms below a second and in minutes from a hundred
    seconds on.
    """
    if seconds >= 100:
        return duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def memory(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the most memory of trainer and engine in each phase, in GiB."""
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        if re.match("memory/.*_(gib|bytes)", key):
            name = re.sub("_gib|_bytes", "", key.removeprefix("memory/")).replace("_", " ")
            most = max(series(rows, key)[1], default=0.0)
            unit = 2**30 if key.endswith("_bytes") else 1
            yield name, f"{most / unit:.2f}"
