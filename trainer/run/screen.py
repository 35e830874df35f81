"""Print a run's progress, with one aligned row for each step, on a terminal or in a log, and a
report at the end.
"""

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

WIDTH = 120
ANSWERS_SHOWN = 2  # in the report
_ROWS_PER_HEADER = 20
_ANSWER_LIMIT = 300  # characters of an answer in the report
_SPARKS = "▁▂▃▄▅▆▇█"

StepMetrics = dict[str, float]


def _number(key: str, form: str) -> Callable[[StepMetrics], str]:
    """Return a function that formats one metric; "" if a step does not have it."""
    return lambda metrics: format(metrics[key], form) if key in metrics else ""


def _seconds(*phases: str) -> Callable[[StepMetrics], str]:
    """Return a function that formats the sum of some phases' seconds; "" if a step has none of
    them.
    """
    keys = [f"time/{phase}" for phase in phases]

    def text(metrics: StepMetrics) -> str:
        if not metrics.keys() & keys:
            return ""
        return f"{sum(metrics.get(key, 0.0) for key in keys):.2f}"

    return text


def _tokens_per_second(metrics: StepMetrics) -> str:
    value = metrics.get("throughput/rollout_tokens_per_s")
    if value is None:
        return ""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _memory(metrics: StepMetrics) -> str:
    """Format memory in GiB: the trainer's peak, and the engine's size awake and asleep."""
    trainer = [value for key, value in metrics.items() if key.startswith("memory/trainer_gib")]
    engine = [value for key, value in metrics.items() if key.startswith("memory/engine_gib")]
    left = f"{max(trainer):.2f}" if trainer else "-"
    right = f"{max(engine):.2f}→{min(engine):.2f}" if engine else "-"
    return f"{left} | {right}" if trainer or engine else ""


# The columns: title, width, a function that formats a step's metrics, and style.
_COLUMNS: list[tuple[str, int, Callable[[StepMetrics], str], str]] = [
    ("reward", 8, _number("reward/mean", ".3f"), "bold"),
    ("eval", 7, _number("eval/accuracy", ".3f"), "bold green"),
    ("gap max", 9, _number("gap/max", ".1e"), ""),
    ("entropy", 9, _number("entropy", ".3f"), ""),
    ("length", 8, _number("length/mean", ".1f"), ""),
    ("cut", 6, _number("length/truncated", ".0%"), ""),
    # Replaces the column before it if answers grow in slices
    ("old", 6, _number("stale/share", ".0%"), ""),
    ("tok/s", 8, _tokens_per_second, "cyan"),
    ("rollout s", 11, _seconds("rollout"), "dim"),
    ("sync", 6, _seconds("sync", "sleep", "wake"), "dim"),
    ("train", 7, _seconds("logprobs", "update"), "dim"),
    ("GiB trainer | engine", 22, _memory, "dim"),
]


_DROPPED = (
    *(
        "GiB trainer | engine",
        "entropy",
        "sync",
        "cut",
        "old",
        "gap max",
        "train",
        "tok/s",
        "rollout s",
        "length",
    ),
    *("eval", "reward"),
)
"""The columns that a narrow terminal goes without, in this order."""
_LEFT_WIDTH = 11  # of the last column, the time left, which stays in every terminal


def _columns(
    metrics: StepMetrics, room: int
) -> list[tuple[str, int, Callable[[StepMetrics], str], str]]:
    """Return the columns that fit into `room` characters beside the step and the time left."""
    hidden = "cut" if "stale/share" in metrics else "old"
    columns = [column for column in _COLUMNS if column[0] != hidden]
    for title in _DROPPED:
        if sum(width for _, width, _, _ in columns) <= room:
            break
        columns = [column for column in columns if column[0] != title]
    return columns


class Progress:
    """Prints a run's progress on rank 0, and nothing on other ranks."""

    def __init__(self, total_steps: int, *, enabled: bool, console: Console | None = None) -> None:
        self._total = total_steps
        self._rows = 0
        self._times: list[float] = []  # times of the first and the latest row
        self.console = console or make_console(enabled)
        self._phase: Callable[[], str] = str
        self._doing, self._since = "", time.monotonic()  # the phase, and its beginning

    def note(self, text: str) -> None:
        """Print a line between the rows, about something that is loaded, saved or resumed."""
        self._since = time.monotonic()
        self.console.print(Text.assemble(("· ", "dim"), text))

    @contextmanager
    def follow(self, phase: Callable[[], str]) -> Iterator[None]:
        """Show `phase()` and its duration on a terminal's last line while the block runs; a log has
        no such line.

        What the user's code prints meanwhile replaces the line, which is drawn again below it. Rich
        could do that too, but a child forked by an engine would inherit its locks.
        """
        with _prints_replace_the_line(self.console):
            if self.console.quiet or not self.console.is_terminal:
                yield
                return
            self._phase, self._since = phase, time.monotonic()
            with Live(
                get_renderable=self.line,
                console=self.console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            ):
                # Live hides it, and a run that is killed could not show it again
                self.console.show_cursor(True)
                yield

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Print a step's row, and the header before the first and after every `_ROWS_PER_HEADER`
        rows.
        """
        step_width = 2 * len(str(self._total)) + 1
        columns = _columns(metrics, self.console.width - step_width - _LEFT_WIDTH)
        if self._rows % _ROWS_PER_HEADER == 0:
            header = Text("step".rjust(step_width), "bold underline")
            header.append("".join(f"{title:>{width}}" for title, width, _, _ in columns))
            self._print(header.append(f"{'left':>{_LEFT_WIDTH}}"))
        self._rows += 1
        self._times = [*self._times[:1], time.monotonic()]
        row = Text(f"{step:>{len(str(self._total))}}/{self._total}", "dim")
        for _, width, show, style in columns:
            row.append(f"{show(metrics):>{width}}", style)
        if skipped := metrics.get("skipped_steps"):
            row.append(f"{f'{skipped:.0f} skipped':>{_LEFT_WIDTH}}", "bold red")
        else:
            left = ""
            if self._rows > 1 and step < self._total:  # at the pace since the first row
                left = remaining(
                    (self._times[-1] - self._times[0]) / (self._rows - 1) * (self._total - step)
                )
            row.append(f"{left:>{_LEFT_WIDTH}}", "dim")
        self._print(row)

    def report(self, report: "Report") -> None:
        """Print the report at the end of the run."""
        self.console.print()
        self.console.print(report.render())

    def line(self) -> Text:
        """Return the line with the current phase and its duration, which is empty during the
        phase's first second.
        """
        name = self._phase()
        steady = re.sub(r"\d+ answers", "", name)
        if steady != self._doing:
            self._doing, self._since = steady, time.monotonic()
        seconds = time.monotonic() - self._since
        text = "" if seconds < 1 else f"  {name}, {duration(seconds)}"
        return Text(text, "dim", no_wrap=True, overflow="ellipsis")

    def _print(self, row: Text) -> None:
        self.console.print(row, no_wrap=True, overflow="crop", crop=True, highlight=False)


class _Replacing:
    """A terminal's stream, on which the first text of a line replaces the line that is there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        """Write a text, after erasing the current line if nothing has been written to it."""
        if self._at_start and text:
            self._stream.write("\r\x1b[2K")
        self._at_start = text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _prints_replace_the_line(console: Console) -> Iterator[None]:
    """While the block runs, have prints replace what `console` shows on the terminal's current
    line.
    """
    output = sys.stdout
    if console.file is output:
        console.file = output  # else it would look up sys.stdout again
    if output.isatty():
        sys.stdout = cast("TextIO", _Replacing(output))
    try:
        yield
    finally:
        sys.stdout = output


@dataclass(frozen=True)
class Report:
    """The report at the end of a run: its results, and where its files are."""

    steps: int
    seconds: float
    # Accuracy on held-out prompts in the first evaluation, 0 to 1; None if there was none
    before: float | None
    after: float | None  # the same in the latest evaluation
    rewards: list[float]  # mean reward of every step
    # Sampled rows with `prompt`, `text`, `reward`; the first `ANSWERS_SHOWN` are shown
    answers: list[dict[str, Any]]
    # Side ("trainer", "engine") -> state ("at its peak", "asleep") -> GiB
    memory: dict[str, dict[str, float]]
    # Paths by name, such as "metrics"; a "model" in Hugging Face format is for `generate`
    paths: dict[str, Path]
    # Largest log-probability gap, trainer to engine, of all steps, nats; None: not measured
    max_gap: float | None
    # From `trainer.run.verdict`; empty if the run has learned
    verdict: list[str] = field(default_factory=list)

    def render(self) -> RenderableType:
        """Return the report as a panel."""
        parts: list[RenderableType] = [self._metrics(), Text()]
        if self.verdict:
            parts += [
                Text(self.verdict[0], "bold yellow"),
                *(Text(f"· {cause}") for cause in self.verdict[1:]),
                Text(),
            ]
        parts += [_answer(row) for row in self.answers[:ANSWERS_SHOWN]]
        parts += [_pairs({name: Text(str(path), "cyan") for name, path in self.paths.items()})]
        commands = (
            {"Look at it": f"report {self.paths['metrics'].parent}"} if "metrics" in self.paths else {}
        )
        commands |= {"Chat with it": f"generate {self.paths['model']}"} if "model" in self.paths else {}
        texts = {
            name: Text(f"{own_command()} {command}", "bold cyan") for name, command in commands.items()
        }
        parts += [Text(), _pairs(texts)] if texts else []
        title = f"[bold]{self.steps} steps in {duration(self.seconds)}[/bold]"
        style = "yellow" if self.verdict else "green"
        return Panel(
            Group(*parts), title=title, box=box.ROUNDED, border_style=style, padding=(1, 2), width=WIDTH
        )

    def _metrics(self) -> Table:
        rows: dict[str, Text] = {}
        if self.after is not None:
            before = ("", "") if self.before is None else (f"{self.before:.1%}", "  →  ")
            better = self.before is None or self.after > self.before
            after = (f"{self.after:.1%}", "bold green" if better else "bold red")
            rows["accuracy"] = Text.assemble(
                before[0], (before[1], "dim"), after, ("  on held-out prompts", "dim")
            )
        if self.rewards:
            curve = (sparkline(self.rewards, 40), "green")
            rows["reward"] = Text.assemble(
                f"{self.rewards[0]:.3f}  ", curve, f"  {self.rewards[-1]:.3f}"
            )
        gap = "not measured" if self.max_gap is None else f"at most {self.max_gap:.1e} nats"
        rows["log-prob gap"] = Text(f"{gap} between trainer and engine")
        for side, states in self.memory.items():
            rows[f"{side} memory"] = Text(
                ", ".join(f"{gib:.2f} GiB {state}" for state, gib in states.items())
            )
        return _pairs(rows)


def own_command() -> str:
    """Return the command with which `hotbunk` can be called from the current folder."""
    installed = Path(sys.prefix) / "bin" / "hotbunk"
    return "hotbunk" if shutil.which("hotbunk") or not installed.exists() else os.path.relpath(installed)


def make_console(enabled: bool = True) -> Console:
    """Return a console with a fixed width for logs and at most that width for terminals."""
    console = Console(quiet=not enabled, highlight=False)
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return Console(quiet=not enabled, highlight=False, width=width)


def duration(seconds: float) -> str:
    """Format a duration, such as 42 s, 3 min 05 s or 2 h 07 min."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02} s"
    return f"{total // 3600} h {total % 3600 // 60:02} min"


def remaining(seconds: float) -> str:
    """Format an estimate of a duration in at most 10 characters: 9 min 05 s, 21 min, 2 h 07 min or
    31 h.
    """
    if 600 <= round(seconds) < 3600:
        return f"{round(seconds) // 60} min"
    return duration(seconds) if seconds < 36000 else f"{seconds / 3600:.0f} h"


def sparkline(values: list[float], width: int) -> str:
    """Draw values as a curve of at most `width` characters, each of which is the mean of a stretch
    of values.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    means = []
    for index in range(count):
        stretch = finite[index * len(finite) // count : (index + 1) * len(finite) // count]
        means.append(sum(stretch) / len(stretch))
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _answer(row: dict[str, Any]) -> RenderableType:
    """Render a sampled answer, with nothing in its text interpreted as markup."""
    texts = []
    for key in ("prompt", "text"):
        raw = str(row.get(key, "")).strip()
        text = "".join(c if c.isprintable() or c == "\n" else "�" for c in raw)
        texts.append(text if len(text) <= _ANSWER_LIMIT else text[: _ANSWER_LIMIT - 1] + "…")
    reward = "answer" if row.get("reward") is None else f"reward {row['reward']:.2f}"
    body = Text.assemble((texts[0], "dim"), "\n", (texts[1], "bold"))
    return Panel(body, title=reward, title_align="right", box=box.SQUARE, border_style="dim")


def _pairs(rows: dict[str, Text]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
