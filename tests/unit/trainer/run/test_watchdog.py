"""Deadlines of phases on one rank; several ranks are in tests/distributed/sharding/test_collectives.py."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.run import processes
from trainer.run import watchdog as module
from trainer.run.watchdog import EXIT_CODE, Watchdog


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects exit codes in place of the process's end; the watchdog looks fifty times a second."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)
    return []


def test_phases_nest_and_an_expired_outer_one_is_found(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    dog = Watchdog(dist.HashStore(), 0, 1, exit_process)
    assert dog.current_phase() == "start-up"
    with dog.phase("step", 0.2), dog.phase("rollout", 60):
        assert dog.current_phase() == "step > rollout"
        assert ended.wait(120)
    assert dog.current_phase() == "step, which has ended"
    dog.close()
    assert codes == [EXIT_CODE]
    text = capsys.readouterr().err
    assert (
        "rank 0 exceeded a deadline, phase step for 0.2 s (deadline 0.2 s); phases of all ranks:" in text
    )
    assert "  rank 0: step > rollout for 0." in text
    assert "in test_phases_nest_and_an_expired_outer_one_is_found" in text


def test_a_phase_past_its_deadline_names_what_it_waits_for_by_then(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    ended, waits = threading.Event(), [""]

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watchdog(dist.HashStore(), 0, 1, exit_process) as dog:
        with dog.phase("step", 60), dog.phase("rollout", 0.3, lambda: waits[0]):
            for count in (5, 3):
                waits[0] = f"{count} episodes in tools"
                assert not ended.wait(0.05)
            assert dog.current_phase() == "step > rollout"
            assert ended.wait(120)
    text = capsys.readouterr().err
    assert (
        "rank 0 exceeded a deadline, phase rollout, 3 episodes in tools for 0.3 s (deadline 0.3 s)"
        in text
    )
    assert "  rank 0: step > rollout, 3 episodes in tools for 0." in text


def test_a_rank_that_leaves_writes_its_latest_collectives(tmp_path: Path) -> None:
    """In a process of its own, since it has a process group."""
    code = """
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.run.watchdog import Watchdog

ended = threading.Event()
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(5), 0)
with Watchdog(store, 0, 1, lambda code: ended.set(), folder=Path(sys.argv[1])) as dog:
    with dog.phase("step 3", 0.1):
        assert ended.wait(120)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    path = tmp_path / "collectives-rank0.json"
    assert f"rank 0: its latest collectives are in {path}" in done.stderr
    entries = json.loads(path.read_text())["entries"]
    assert [(entry["profiling_name"], entry["input_sizes"]) for entry in entries[:2]] == [
        ("gloo:all_reduce", [[3]]),
        ("gloo:broadcast", [[5]]),
    ]


def test_errors_name_their_phase_and_device(
    codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "words"
    words.touch()
    monkeypatch.setenv(processes.LAST_WORDS, str(words))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "_said", False)
    monkeypatch.setattr(processes, "leave", codes.append)

    def main() -> int:
        with Watchdog(dist.HashStore(), 0, 1, codes.append, device="cuda:1") as dog:
            with dog.phase("step 3", 60), dog.phase("update", 60):
                raise torch.OutOfMemoryError("CUDA out of memory.")

    processes.run(main)
    text = "in phase step 3 > update on cuda:1: CUDA out of memory."
    assert json.loads(words.read_text()) == {"rank": 1, "kind": "OutOfMemoryError", "text": text}
    assert codes == [1]


def test_phases_in_time_pass_and_a_phase_that_raised_is_over(codes: list[int]) -> None:
    with Watchdog(dist.HashStore(), 0, 1, codes.append) as dog:
        with pytest.raises(KeyError), dog.phase("update", 0.05):
            raise KeyError
        assert not threading.Event().wait(0.2)
        assert dog.current_phase() == "update, which has ended"
    assert codes == []


def test_a_rank_that_is_asked_to_end_informs_all_ranks(codes: list[int]) -> None:
    store = dist.HashStore()
    with Watchdog(store, 0, 2, codes.append) as one, Watchdog(store, 1, 2, codes.append) as other:
        assert one.called_at is other.called_at is None
        assert one.call_all()
        assert other.called_at is not None and one.called_at is not None
        assert other.call_all()  # asked, too, by the same signal


def test_a_rank_that_is_asked_to_end_learns_that_one_is_dead(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALL_SECONDS", 0.3)
    with Watchdog(dist.HashStore(), 0, 2, codes.append) as dog:
        assert not dog.call_all()


@pytest.mark.parametrize("end", ["vanished", "closed"])
def test_a_rank_that_falls_silent_ends_the_run(
    codes: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.5)
    store, ended = dist.HashStore(), threading.Event()

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watchdog(store, 0, 3, exit_process) as dog, dog.phase("update", 60):
        with Watchdog(store, 1, 3, codes.append) as other:
            while not dog._heard:
                threading.Event().wait(0.01)
            if end == "vanished":
                other._closed.set()
                assert ended.wait(120)
        if end == "closed":
            assert not ended.wait(1.5)
    text = capsys.readouterr().err
    assert codes == ([EXIT_CODE] if end == "vanished" else [])
    assert ("rank 0 has heard nothing of rank 1 for 0.5 s; phases of all ranks:" in text) == (
        end == "vanished"
    )


class Unplugged:
    """A store that answers no more: the machine that held it closed no connection."""

    def __init__(self, answers: int) -> None:
        self.answers, self.closed, self.kept = answers, threading.Event(), dist.HashStore()

    def clone(self) -> "Unplugged":
        return self

    def set_timeout(self, _: object) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self.kept.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.answers -= 1
        if self.answers < 0:
            self.closed.wait()
        return self.kept.check(keys)


@pytest.mark.parametrize("far", [True, False])
def test_a_store_on_another_machine_that_answers_no_more_is_left(
    far: bool, codes: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A silent store on this machine is waited for, since its process may be stopped for a while."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "_STORE_SILENT_SECONDS", 0.4)
    store, left = Unplugged(answers=60), threading.Event()

    def exit_process(code: int) -> None:
        assert store.answers < 0, "left while it answered"
        codes.append(code)
        left.set()

    with Watchdog(store, 1, 1, exit_process, far=far):  # type: ignore[arg-type]
        assert left.wait(60 if far else 3) == far
        store.closed.set()
    assert codes == [EXIT_CODE] * far
    assert (
        "rank 1: has had no answer from the first machine for 0.4 s" in capfd.readouterr().err
    ) == far


def test_an_alarm_of_another_rank_ends_this_rank(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    ended = threading.Event()

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    with Watchdog(store, 0, 1, exit_process) as dog, dog.phase("update", 60):
        store.add("watchdog/alarm", 1)
        assert ended.wait(120)
    assert codes == [EXIT_CODE]
    assert "rank 0: phase update for" in capsys.readouterr().err


def test_a_hang_that_holds_the_interpreters_lock_ends_too() -> None:
    program = """
import re, torch.distributed as dist
from trainer.run import watchdog
watchdog._HELD_LOCK_MARGIN_SECONDS = 0.5
with watchdog.Watchdog(dist.HashStore(), 0, 1).phase("reward", 0.2):
    re.match(r"(a*)*$", "a" * 100 + "b")   # C code that runs for years and never lets another thread in
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "Timeout" in ended.stderr and "in match" in ended.stderr
