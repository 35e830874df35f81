"""`hotbunk report` on runs that ended well, were killed, or never began."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from rich.console import Console

from tests.support.refusals import refusal
from tests.support.rows import write_rows
from trainer.cli import main
from trainer.commands.report_page import page_data
from trainer.commands.report_record import memory, metric_lines, phases, read_record, remarks, state
from trainer.run.finish import export_and_report
from trainer.run.keeper import RunState
from trainer.run.records import read_rows
from trainer.run.screen import Report

ROWS = [
    {"train/step": 0, "eval/accuracy": 0.25, "eval/maths/pass@4": 0.5, "time/eval": 2.0},
    {
        "train/step": 1,
        "reward/mean": 0.5,
        "gap/max": 1e-5,
        "gap/mean": 1e-6,
        "time/step": 4.0,
        "time/rollout": 3.0,
    },
    {
        "train/step": 2,
        "reward/mean": 0.75,
        "gap/max": 3e-5,
        "gap/mean": 3e-6,
        "time/step": 6.0,
        "time/rollout": 5.0,
    },
    {
        "train/step": 3,
        "reward/mean": 0.25,
        "gap/max": None,
        "skipped_steps": 2.0,
        "rollout/failed": 1.0,
        "length/truncated": 0.25,
        "time/step": 60.0,
        "eval/accuracy": 0.125,
        "memory/engine_gib_awake": 1.5,
        "memory/offloaded_gib": 0.25,
        "memory/peak_allocated_bytes": 3 * 2.0**30,
        "memory/alloc_retries": 2.0,
    },
]
ANSWERS = [
    {
        "train/step": 3,
        "prompt": f"p{n}?",
        "text": f"answer {n}",
        "reward": n / 10,
        "finish_reason": "stop",
    }
    for n in (3, 1, 9, 5, 7, 9)
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_rows(folder / "metrics.jsonl", ROWS)
    write_rows(folder / "completions.jsonl", ANSWERS)
    recipe = {
        "run": {"name": "mine", "steps": 3, "seed": 0},
        "model": {"path": "m"},
        "policy": {"lr": 2e-5},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def cells(lines: Iterator[Sequence[str]]) -> dict[str, list[str]]:
    """Return the lines of a table by their first cell."""
    return {line[0]: list(line[1:]) for line in lines}


def test_the_report_of_a_finished_run_is_complete(run: Path) -> None:
    record = read_record(run)
    assert state(record).startswith("3 steps in 1 min 10 s, the last of them at ")
    table = cells(metric_lines(record.rows))
    assert table["reward/mean"] == ["0.5", "0.75 (step 2)", "0.25", "▅█▁"]
    assert (
        table["eval/accuracy"] == ["0.25", "0.25 (step 0)", "0.125", "█▁"]
        and "eval/maths/pass@4" in table
    )
    assert cells(phases(record.rows))["rollout"] == ["8 s", "80.0%", "4.00 s", "5.00 s (step 2)"]
    gib = cells(memory(record.rows))
    assert gib == {"engine awake": ["1.50"], "offloaded": ["0.25"], "peak allocated": ["3.00"]}
    text = "\n".join(remarks(record.rows))
    assert "at most 3.0e-05 nats (step 2), 2.0e-06 on average" in text
    assert "2 updates skipped" in text and "1 episodes that failed" in text
    assert "reward functions" not in text  # none failed
    recipe = {
        key: (value, usual, changed) for key, value, usual, changed in page_data([record])["recipe"]
    }
    assert recipe["policy.lr"] == ("2.0e-05", "1.0e-06", True) and recipe["run.seed"] == (
        "0",
        "0",
        False,
    )
    assert recipe["model.path"] == ("m", "", True)


def test_failed_rewards_are_reported_by_function_and_kind() -> None:
    kinds = ({"f/timeout": 2.0}, {"f/timeout": 1.0, "g/raised": 1.0})
    rows: list[dict[str, Any]] = [
        {"train/step": n, "reward/errors": 2.0}
        | {f"reward/errors/{name}": count for name, count in counts.items()}
        for n, counts in enumerate(kinds)
    ]
    rows[1]["eval/misjudged"] = 0.125
    lines = list(remarks(rows))
    assert "4 answers on which a reward function failed (f/timeout 3, g/raised 1)" in lines
    assert "held-out answers counted as wrong since a reward function failed: 12.5% at most" in lines


def test_a_gap_that_was_not_measured_is_not_0_anywhere(run: Path) -> None:
    """The gap of one step is not finite, and the first and the last step have none."""
    text = "\n".join(remarks(ROWS))
    assert "gap between trainer and engine: not finite in 1 steps, first in step 3" in text
    assert "not measured" not in text
    without = [{k: v for k, v in row.items() if not k.startswith("gap/")} for row in ROWS]
    text = "\n".join(remarks([without[1], ROWS[2], without[3]]))
    assert "gap between trainer and engine: at most 3.0e-05 nats (step 2)" in text
    assert "gap between trainer and engine: not measured in 2 of 3 steps" in text

    state = RunState()
    assert asdict(state)["largest_gap"] is None
    for metrics, largest in (
        ({}, None),
        ({"gap/max": 2e-5}, 2e-5),
        ({}, 2e-5),
        ({"gap/max": 1e-5}, 2e-5),
    ):
        state.count_step({"time/step": 1.0} | metrics)
        assert state.largest_gap == largest
    for gap in (math.nan, 1e-5):  # once it was not finite, no later one makes up for it
        state.count_step({"time/step": 1.0, "gap/max": gap})
        assert math.isnan(state.largest_gap or 0.0)


@pytest.mark.parametrize(
    ("gap", "text"), [(None, "not measured between"), (2e-5, "at most 2.0e-05 nats between")]
)
def test_the_last_screen_and_the_summary_tell_a_gap_of_0_from_none(
    gap: float | None, text: str, run: Path
) -> None:
    summary, report = finished(run, RunState(step=3, seconds=70.0, largest_gap=gap))
    assert summary["max_logprob_gap"] == gap
    console = Console(width=120, file=(screen := io.StringIO()))
    console.print(report.render())
    assert text in screen.getvalue()


def test_answers_in_slices_have_a_line_for_their_age() -> None:
    assert not [line for line in remarks(ROWS) if line.startswith("tokens of earlier versions")]
    ages = [(0.0, 0.0, 0.0, 1.0), (0.5, 1.25, 2.0, 0.75), (0.25, 1.0, 3.0, 0.875)]
    names = ("stale/share", "stale/age_mean", "stale/age_max", "correction/effective")
    rows = [row | dict(zip(names, age, strict=True)) for row, age in zip(ROWS[1:], ages, strict=True)]
    assert [line for line in remarks(rows) if line.startswith("tokens of earlier versions")] == [
        "tokens of earlier versions: 25%; answers began 0.75 steps earlier on average, at most 3; "
        "effective sample size at least 75%"
    ]


def finished(run: Path, state: RunState) -> tuple[dict[str, Any], Report]:
    """Return the summary and the last screen of a run that exports no model."""
    config: Any = SimpleNamespace(
        run=SimpleNamespace(folder=run), checkpoint=SimpleNamespace(export_hf=False)
    )
    config.model_dump = lambda: yaml.safe_load((run / "config.yaml").read_text())
    prompts, policy = type("Prompts", (list,), {"dropped": 0})(), SimpleNamespace(version=0)
    tracker, screen = mock.Mock(), mock.Mock()
    export_and_report(config, policy, mock.Mock(), prompts, state, tracker, screen, [])  # type: ignore[arg-type]
    return tracker.summary.call_args.args[0], screen.report.call_args.args[0]


def test_a_run_that_has_not_learned_says_so_on_its_last_screen_and_in_the_report(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = finished(run, RunState(step=3, seconds=70.0))
    assert report.verdict == []  # too short to tell
    rows = [{"train/step": n, "reward/mean": 0.25, "reward/std": 0.0} for n in range(1, 41)]
    write_rows(run / "metrics.jsonl", rows)
    _, report = finished(run, RunState(step=40, seconds=70.0))
    console = Console(width=120, file=(screen := io.StringIO()))
    console.print(report.render())
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    for sentence in (
        "This run has not learned: its mean reward went from 0.25",
        "every answer got the same reward, 0.25",
    ):
        assert (
            sentence in screen.getvalue()
            and sentence in output
            and sentence in (run / "report.html").read_text()
        )


def test_a_killed_run_is_reported_up_to_its_last_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(content[: content.rindex("{") + 40])
    (run / "completions.jsonl").unlink()
    assert [row["train/step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1, 2]
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr().out
    assert (
        "Not finished: 2 of 3 steps in 10 s" in output
        and "reward/mean" in output
        and f"{run}/report.html" in output
    )
    assert "Not finished: 2 of 3 steps in 10 s" in (run / "report.html").read_text()


def test_the_last_screen_of_a_run_shows_accuracy_where_it_says_so(run: Path) -> None:
    _, report = finished(run, RunState(step=3, seconds=70.0, largest_gap=3e-5))
    # And not the mean of a weighted sum of rewards
    assert (report.before, report.after) == (0.25, 0.125)
    assert report.rewards == [0.5, 0.75, 0.25]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("absent", "has no metrics.jsonl, so it is not a run's folder"), ("begun", "has no step yet")],
)
def test_a_report_without_a_run_ends_in_one_sentence(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"train/st')
    assert sentence in refusal(capsys, "report", str(tmp_path / name))
