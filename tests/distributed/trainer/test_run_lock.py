"""A run folder has one process tree: real processes compete for it, and what dead runs leave is swept."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from generation import guardian
from tests.conftest import ROOT
from tests.support.real_run import write_recipe
from trainer.errors import UserError
from trainer.run.lock import RunLock

# A rank that takes the lock or is refused, with a child in a session of its own that ignores SIGTERM. Of two ranks, the
# second shares the lock when the first has taken it.
RANK = """
    import os, subprocess, sys, time
    from pathlib import Path
    from trainer.run import processes
    from trainer.errors import UserError
    from trainer.run.lock import RunLock

    folder, name, patience, count = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    lock = RunLock(folder)
    processes.start_guardian(lock.descriptor)

    def main():
        try:
            lock.take(patience) if name != "1" else None
        except UserError as error:
            print(error, flush=True)
            return 2
        lock.share(int(name), count)
        subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 1000"], start_new_session=True)
        print(f"has it, {os.getpid()}", flush=True)
        time.sleep(1000)

    processes.run(main)
"""


class Rank:
    """A process that runs the script above; the rank itself is below its guardians."""

    def __init__(
        self, folder: Path, scratch: Path, name: str = "0", patience: float = 30, ranks: int = 1
    ) -> None:
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(RANK))
        command = [sys.executable, str(script), str(folder / "run"), name, str(patience), str(ranks)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def takes_it(self) -> int:
        """Wait until the rank has taken the lock; return the process id of the rank itself."""
        if "; waiting up to" in (line := self.line()):
            line = self.line()
        assert line.startswith("has it, "), line
        return int(line.split()[-1])


StartRank = Callable[..., Rank]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Yield a folder for temporary files, with the short path that sockets need."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def ranks(tmp_path: Path, scratch: Path) -> Iterator[StartRank]:
    """Yield a function that starts ranks; at the end, those still running are killed."""
    started: list[Rank] = []

    def start(*arguments) -> Rank:
        started.append(Rank(tmp_path, scratch, *arguments))
        return started[-1]

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.communicate(timeout=120)  # the pipe closes when the last guardian has ended


def test_a_second_start_is_refused_with_the_process_of_the_first(
    ranks: StartRank, tmp_path: Path
) -> None:
    first = ranks()
    first.takes_it()
    second = ranks("0", 1.0)
    owner = f"{tmp_path / 'run'} is in use by process {first.process.pid} on {socket.gethostname()}"
    assert second.line() == f"[hotbunk] {owner}; waiting up to 1 s for that to end\n"
    sentence = second.line()
    assert sentence.startswith(f"{owner} after 1 s: ".replace("is in use", "is still in use"))
    assert second.process.wait(120) == 2
    assert first.process.poll() is None
    first.process.kill()
    ranks().takes_it()


def test_the_lock_is_free_only_when_nothing_is_left_of_the_run(ranks: StartRank, tmp_path: Path) -> None:
    first = ranks()
    pid = first.takes_it()
    family = psutil.Process(first.process.pid).children(recursive=True)
    second = ranks()
    assert "waiting up to 30 s" in second.line()
    os.kill(pid, signal.SIGKILL)  # its child has two seconds to end, and stays
    second.takes_it()
    # Until the launcher waits, the outer guardian is a zombie
    assert psutil.wait_procs(family, timeout=0)[1] == []


@pytest.mark.parametrize("last", [0, 1])
def test_two_ranks_share_the_lock_until_both_are_gone(
    ranks: StartRank, tmp_path: Path, last: int
) -> None:
    both = []
    for name in ("0", "1"):  # in this order: the second shares the lock once the first has it
        both.append(ranks(name, 30, 2))
        both[-1].takes_it()
    both[1 - last].process.kill()
    both[1 - last].process.communicate(timeout=120)
    third = ranks("0", 1.0)
    assert f"process {both[0].process.pid} on" in third.line()
    assert third.process.wait(120) == 2
    both[last].process.kill()
    ranks().takes_it()


def test_a_rank_does_not_share_a_lock_that_another_run_has_taken(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take(0)
    # As may happen while the lock is changed to a shared one
    fcntl.flock(first.descriptor, fcntl.LOCK_UN)
    second.take(0)
    with pytest.raises(UserError, match="has been taken by process"):
        first.share(0, 2)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_in_a_line_and_accepted(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock(tmp_path).take(0)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "file system without locks" in errors


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_waits_for_the_lock_as_long_as_a_run_may_take_to_save(
    tmp_path: Path, tiny_qwen2: Path, command: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_qwen2, run={"name": "mine"}, checkpoint={"grace_s": 17})
    folder = tmp_path / "runs" / "mine"
    held = RunLock(folder)
    held.take(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", command, str(recipe), "--resume", "none"],
        cwd=ROOT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    process.terminate()
    process.communicate(timeout=120)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    assert line == f"[hotbunk] {folder} is in use by {owner}; waiting up to 77 s for that to end\n"


def test_files_of_dead_runs_are_swept_and_no_others(ranks: StartRank, scratch: Path) -> None:
    living = ranks("0")
    living.takes_it()
    (kept,) = scratch.glob("hotbunk-0-*")
    dead = scratch / "hotbunk-1-dead"
    dead.mkdir()
    os.close(guardian.lock_folder(dead))
    (dead / "engine.sock").touch()
    memory = Path("/dev/shm") / f"torch_{os.getpid()}_12345_0"
    memory.touch()
    (dead / f"remove-{memory.name}").symlink_to(memory)
    unlocked, elsewhere, foreign = (
        scratch / "hotbunk-0-new",
        scratch / "elsewhere",
        scratch / "hotbunk-0-foreign",
    )
    for folder in (unlocked, elsewhere, foreign):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (elsewhere, foreign):
        os.close(guardian.lock_folder(folder))
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    (scratch / "hotbunk-0-link").symlink_to(elsewhere)
    before = os.listdir(kept)
    swept = guardian.sweep(scratch)
    assert swept == ([dead] if os.getuid() == 0 else [foreign, dead])
    assert not dead.exists() and not memory.exists()
    assert os.listdir(kept) == before
    assert all((folder / "file").exists() for folder in (unlocked, elsewhere))
    assert (foreign / "file").exists() == (os.getuid() == 0)


def test_a_start_sweeps_the_files_of_a_run_killed_with_its_guardians(
    ranks: StartRank, scratch: Path
) -> None:
    first = ranks()
    pid = first.takes_it()
    (folder,) = scratch.glob("hotbunk-0-*")
    family = [
        *psutil.Process(first.process.pid).children(recursive=True),
        psutil.Process(first.process.pid),
    ]
    for member in family:
        member.suspend()  # otherwise some would clean up after others
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=120)
    assert folder.exists() and pid in [member.pid for member in family]
    ranks().takes_it()
    assert not folder.exists()
