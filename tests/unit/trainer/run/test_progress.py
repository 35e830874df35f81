"""The display of a run in a terminal: rows, report, curves, memory."""

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from sharding.wire.staging import return_free_pages
from trainer.run import meters, screen
from trainer.run.meters import MemoryMeter
from trainer.run.screen import WIDTH, Progress, Report, duration, remaining, sparkline

FULL = {
    "reward/mean": 0.4375,
    "eval/accuracy": 0.5,
    "gap/max": 1.5e-5,
    "entropy": 0.75,
    "length/mean": 123.4,
    "length/truncated": 0.02,
    "throughput/rollout_tokens_per_s": 11234.0,
    "time/rollout": 0.35,
    "time/sync": 0.03,
    "time/sleep": 0.01,
    "time/wake": 0.02,
    "time/logprobs": 0.1,
    "time/update": 0.2,
    "memory/trainer_gib_update": 0.61,
    "memory/trainer_gib_rollout": 0.5,
    "memory/engine_gib_rollout": 1.32,
    "memory/engine_gib_update": 0.42,
}


def printed(
    steps: list[tuple[int, dict[str, float]]], total: int = 400, terminal: bool = False
) -> list[str]:
    """Return the lines a run of these steps prints, without colours."""
    output = io.StringIO()
    console = Console(file=output, width=WIDTH, force_terminal=terminal, no_color=True, highlight=False)
    table = Progress(total, enabled=True, console=console)
    for step, metrics in steps:
        table.step(step, metrics)
    return output.getvalue().splitlines()


def test_rows_are_aligned_with_the_header_and_fit_the_width() -> None:
    lines = printed([(1, FULL), (2, {}), (399, FULL | {"reward/mean": -1.0, "eval/accuracy": math.nan})])
    assert all(cell_len(line) <= WIDTH for line in lines)
    header, row = lines[0], lines[1]
    cells = {
        "reward": "0.438",
        "eval": "0.500",
        "gap max": "1.5e-05",
        "entropy": "0.750",
        "length": "123.4",
        "cut": "2%",
    }
    cells |= {"tok/s": "11.2k", "rollout s": "0.35", "sync": "0.06", "train": "0.30"}
    cells["GiB trainer | engine"] = "0.61 | 1.32→0.42"
    for title, value in cells.items():
        end = header.index(title) + len(title)
        assert row[:end].endswith(" " + value), title  # right under its title's end
    assert row.startswith("  1/400") and lines[2].split()[0] == "2/400"
    assert lines[3].startswith("399/400")


def test_the_header_comes_back_every_twenty_rows() -> None:
    lines = printed([(step, FULL) for step in range(1, 46)])
    assert [index for index, line in enumerate(lines) if line.lstrip().startswith("step")] == [0, 21, 42]
    assert len(lines) == 45 + 3


def test_skipped_steps_are_shown() -> None:
    assert printed([(1, FULL | {"skipped_steps": 2.0})])[1].endswith("2 skipped")


def test_a_log_gets_the_same_columns_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert screen.make_console().width == WIDTH  # standard output is no terminal here
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert screen.make_console().width == 40


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    table = Progress(10, enabled=False)
    table.note("loading")
    table.step(1, FULL)
    table.report(report())
    assert capsys.readouterr().out == ""


def report(**changes: object) -> Report:
    values: dict[str, object] = {
        "steps": 40,
        "seconds": 101.3,
        "before": 0.31,
        "after": 0.9375,
        "rewards": [0.1, 0.5, 0.9],
        "answers": [
            {"prompt": "17+25=", "text": "42 [bold]really[/nothing]\x1b[31m", "reward": 1.0},
            {"prompt": "1+1=", "text": "long " * 1000, "reward": 0.0},
            {"prompt": "third", "text": "never shown"},
        ],
        "memory": {"trainer": {"at its peak": 0.61}, "engine": {"awake": 1.32, "asleep": 0.42}},
        "paths": {
            "model": Path("runs/demo/model"),
            "metrics": Path("runs/demo/metrics.jsonl"),
        },
        "max_gap": 2.1e-5,
    }
    return Report(**(values | changes))  # type: ignore[arg-type]


def rendered(report: Report) -> str:
    output = io.StringIO()
    Progress(40, enabled=True, console=Console(file=output, width=WIDTH)).report(report)
    assert all(cell_len(line) <= WIDTH for line in output.getvalue().splitlines())
    return output.getvalue()


def test_the_report_says_how_it_went_and_what_to_do_next() -> None:
    text = rendered(report())
    for expected in (
        *("40 steps in 1 min 41 s", "31.0%  →  93.8%", "at most 2.1e-05 nats", "0.61 GiB at its peak"),
        *("1.32 GiB awake, 0.42 GiB asleep", "hotbunk generate runs/demo/model", "reward 0.00"),
    ):
        assert expected in text
    # An answer is text, whatever it looks like
    assert "42 [bold]really[/nothing]" in text and "\x1b" not in text
    assert "never shown" not in text and len(text) < 6000


def test_the_report_of_a_run_without_evaluation_or_answers() -> None:
    text = rendered(report(before=None, after=None, rewards=[], answers=[], memory={}, paths={}))
    assert "accuracy" not in text and "hotbunk generate" not in text
    assert "→" not in rendered(report(before=None)) and "93.8%" in rendered(report(before=None))


def test_durations_and_sparklines_are_readable() -> None:
    assert [duration(value) for value in (0.4, 59.4, 59.6, 3599, 7620)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "2 h 07 min")
    ]
    left = [remaining(value) for value in (59.6, 599, 600, 1263, 3599.6, 7620, 36000, 111600)]
    assert left == [
        *("1 min 00 s", "9 min 59 s", "10 min", "21 min", "1 h 00 min", "2 h 07 min", "10 h", "31 h")
    ]
    # Beside a column of 11 characters
    assert all(len(remaining(1.01**power)) <= 10 for power in range(1300))
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([2.0, math.nan, 2.0], 5) == "▁▁" and sparkline([], 5) == ""
    assert len(sparkline([float(value) for value in range(1001)], 40)) == 40


def resident_gib() -> float:
    """Return this process's resident memory in GiB, without the pages of files."""
    sizes = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, sizes)) / 2**20


def test_the_meter_sees_a_peak_that_is_over_and_in_its_phase_only() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    # Of earlier tests, or these numbers would be of gaps in the heap that are filled
    return_free_pages()
    before = resident_gib()
    with meter.phase("rollout"):
        pass
    with meter.phase("update"):
        torch.ones(128 * 2**20 // 4).sum()
    with meter.phase("update"):  # the larger one counts
        return_free_pages()
    with meter.phase("staging"):
        torch.empty(64 * 2**20 // 4).share_memory_().fill_(1.0)
    with meter.phase("sync"):
        pass
    peaks = {
        key.removeprefix("memory/trainer_gib_"): value - before for key, value in meter.metrics().items()
    }
    assert set(peaks) == {"rollout", "update", "staging", "sync"}
    assert peaks["update"] == pytest.approx(1 / 8, rel=0.2)
    assert peaks["staging"] == pytest.approx(1 / 16, rel=0.2)  # shared memory counts, too
    assert abs(peaks["rollout"]) < 1 / 64 and abs(peaks["sync"]) < 1 / 64
    assert meter.metrics() == {}


def test_the_meter_works_where_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(meters.Path, "write_text", refused)
    meter = MemoryMeter(torch.device("cpu"))
    with meter.phase("update"):
        pass
    assert meter.metrics()["memory/trainer_gib_update"] >= resident_gib() - 0.01


def test_only_a_terminal_shows_the_current_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    phase = ["start-up"]
    for terminal in (False, True):
        now[0], phase[0] = 100.0, "start-up"
        output = io.StringIO()
        console = Console(
            file=output, width=WIDTH, force_terminal=terminal, no_color=True, legacy_windows=False
        )
        progress = Progress(5, enabled=True, console=console)
        with progress.follow(lambda: phase[0]):
            if not terminal:
                now[0] = 200.0
                progress.note("something new")
                assert output.getvalue() == "· something new\n"
                continue
            assert progress.line().plain == ""  # nothing is worth a line yet
            now[0] = 103.0
            assert progress.line().plain == "  start-up, 3 s"
            phase[0] = "step 1 > rollout, 3 answers"
            progress.line()
            now[0], phase[0] = 170.0, "step 1 > rollout, 12 answers"  # the same phase
            assert progress.line().plain == "  step 1 > rollout, 12 answers, 1 min 07 s"
            progress.note("something new")
            assert progress.line().plain == ""
        # The cursor is there
        assert output.getvalue().rindex("\x1b[?25h") > output.getvalue().index("\x1b[?25l")
