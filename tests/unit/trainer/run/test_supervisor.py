"""The ends of a run after which it is started again. The launcher is a script with scripted ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.rows import read_rows
from trainer.run.supervisor import marks

STAND_IN = """
import json, os, sys, time
ends, calls = sys.argv[1:3]
with open(calls, "a") as file:
    file.write(json.dumps(sys.argv[3:]) + "\\n")
end = json.load(open(ends))[len(open(calls).readlines()) - 1]
for name, mark in end.get("saves", {}).items():
    os.makedirs(f"{os.path.dirname(calls)}/checkpoints/{name}", exist_ok=True)
    open(f"{os.path.dirname(calls)}/checkpoints/{name}/COMPLETE", "w").write(mark)
    os.utime(f"{os.path.dirname(calls)}/checkpoints/{name}/COMPLETE", (0, 0))  # by a clock that is decades behind
if "outcome" in end:
    open(os.environ["HOTBUNK_OUTCOME"], "w").write(json.dumps(end["outcome"]))
if "sleep" in end:
    print("sleeping", flush=True)
    time.sleep(end["sleep"])
if end["code"] < 0:
    os.kill(os.getpid(), -end["code"])
sys.exit(end["code"])
"""
SUPERVISE = """
import sys
from trainer.run import supervisor
sys.exit(supervisor.supervise(sys.argv[2:], int(sys.argv[1]), lambda failures: 0.0))
"""


def command(folder: Path, restarts: int, *ends: dict[str, Any]) -> list[str]:
    (folder / "ends.json").write_text(json.dumps(ends))
    launcher = [sys.executable, "-c", STAND_IN, str(folder / "ends.json"), str(folder / "calls")]
    return [sys.executable, "-c", SUPERVISE, str(restarts), *launcher]


def supervised(
    folder: Path, restarts: int, *ends: dict[str, Any]
) -> tuple[int, list[list[str]], list[str]]:
    """Return the exit code, the arguments of each start, and the messages, for launchers with these ends."""
    done = subprocess.run(
        command(folder, restarts, *ends),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    calls = read_rows(folder / "calls")
    return done.returncode, calls, [line.removeprefix("[hotbunk] ") for line in done.stderr.splitlines()]


def died(step: int, *kinds: str, code: int = 1, **outcome: Any) -> dict[str, Any]:
    reasons = ["rank 1: was ended by SIGKILL"]
    return {"code": code, "outcome": {"step": step, "kinds": kinds, "reasons": reasons} | outcome}


DONE = {"code": 0}


def test_a_run_that_died_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    code, calls, lines = supervised(
        tmp_path, 5, died(2, code=137), {"code": -9}, died(4, "TimeoutError", code=124), DONE
    )
    assert code == 0 and len(calls) == 4
    assert lines == [
        "failed in step 2, exit code 137: starting again in 0 s, 4 restarts left after that",
        "failed in an unknown step, exit code 137: starting again in 0 s, 3 restarts left after that",
        "failed in step 4, exit code 124: starting again in 0 s, 2 restarts left after that",
    ]


def test_a_run_goes_on_from_what_it_has_saved_itself_and_from_nothing_older(tmp_path: Path) -> None:
    """A checkpoint left by an earlier run is not used although its time is the newest."""
    folder = tmp_path / "checkpoints"
    (folder / "step_40").mkdir(parents=True)
    (folder / "step_40" / "COMPLETE").write_text("an earlier run's")
    there = {"checkpoints": str(folder), "before": marks(folder)}
    ends = [
        died(1, **there),
        died(3, **there),
        died(4, **there) | {"saves": {"step_3": "its own"}},
        died(5),
        DONE,
    ]
    _, calls, _ = supervised(tmp_path, 5, *ends)
    assert calls == [[], [], [], ["--resume", "auto"], ["--resume", "auto"]]


def test_checkpoints_that_a_launcher_reports_count_as_progress(tmp_path: Path) -> None:
    _, calls, _ = supervised(tmp_path, 5, died(1), died(3, saved=True), died(4), DONE)
    assert calls == [[], [], ["--resume", "auto"], ["--resume", "auto"]]


@pytest.mark.parametrize("name", ["step_2", "step_40"])
def test_checkpoints_of_a_killed_launcher_count_as_progress(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "step_40").mkdir(parents=True)
    (folder / "step_40" / "COMPLETE").write_text("an earlier run's")
    # A launcher tells this when it begins
    outcome = {"checkpoints": str(folder), "before": marks(folder)}
    killed = {"code": -9, "outcome": outcome, "saves": {name: "its own"}}
    _, calls, _ = supervised(tmp_path, 5, killed, {"code": -9}, DONE)
    assert calls == [[], ["--resume", "auto"], ["--resume", "auto"]]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (died(3, "UserError", code=2), "UserError would recur"),
        ({"code": 2}, "a mistake in the recipe or the machine would recur"),
        (died(3, "RemoteError", "TrainingDiverged"), "TrainingDiverged would recur"),
        (died(3, "RewardError"), "RewardError would recur"),
        (died(3, "RolloutError"), "RolloutError would recur"),
        (died(3, "Interrupted", code=143), "the run was asked to end"),
        (died(3, "Interrupted", code=130), "the run was asked to end"),
    ],
)
def test_a_run_that_would_fail_again_or_was_asked_to_end_is_left_alone(
    end: dict[str, Any], why: str, tmp_path: Path
) -> None:
    code, calls, lines = supervised(tmp_path, 5, end, DONE)
    assert (code, len(calls), lines) == (end["code"], 1, [f"not started again: {why}"])


def test_the_third_failure_of_one_step_ends_the_run(tmp_path: Path) -> None:
    ends = [died(2), died(5), died(5), died(5, code=137)]
    code, calls, lines = supervised(tmp_path, 9, *ends, DONE)
    assert code == 137 and len(calls) == 4
    assert (
        lines[-1]
        == "not started again: step 5 has failed 3 times, the last time as rank 1: was ended by SIGKILL"
    )


def test_restarts_are_counted(tmp_path: Path) -> None:
    code, calls, lines = supervised(tmp_path, 2, *map(died, (1, 2, 3, 4)), DONE)
    assert code == 1 and len(calls) == 3
    assert lines[-1] == "not started again: no restarts left, step 3 failed last"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """The launcher gets the signal once, since it has its own session."""
    process = subprocess.Popen(
        command(tmp_path, 5, {"code": 0, "sleep": 100}, DONE),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"sleeping\n"
    os.killpg(process.pid, number)
    assert process.wait(60) == 128 + number
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_the_launcher_ends_with_its_supervisor(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, 5, {"code": 0, "sleep": 100}, DONE),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"sleeping\n"
    process.kill()
    assert process.stdout.read() == b""  # at the end of everybody who has it open
    process.wait(60)
