"""Whatever ends a run, nothing of it is left 20 s later. torchrun is real, and the ranks' children are stand-ins."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.forked import PYTHON

DEADLINE = 20.0

# A rank with everything a real one has: an engine in a session of its own, spawned workers (one with two children, of
# which one has the run's mark only in its name; another ignores SIGTERM), shared memory and a socket.
RANK = """
    import mmap, multiprocessing, os, socket, subprocess, sys, time
    from multiprocessing import shared_memory
    from pathlib import Path
    from trainer.run import processes

    def worker(unmarked):
        subprocess.Popen(["sleep", "1000"])
        command = ["sleep", "1000", "0." + os.environ["HOTBUNK_TEST_RUN"]]
        subprocess.Popen(command, env={}, start_new_session=True)
        unmarked.touch()
        time.sleep(1000)

    def stubborn():
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def main():
        folder = processes.start_guardian()
        processes.install_signal_handlers(lambda: "rollout", grace_seconds=3.0)
        if "reward" in sys.argv:
            judge(folder)
        if "early" in sys.argv:
            report(folder, "")
            time.sleep(1000)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        spawn = multiprocessing.get_context("spawn")
        unmarked = Path(sys.argv[1]) / f"unmarked-{os.getpid()}"
        spawn.Process(target=worker, args=(unmarked,)).start()
        spawn.Process(target=stubborn).start()
        memory = shared_memory.SharedMemory(create=True, size=4096)
        workers = Path("/dev/shm") / f"vllm_dist_{os.getpid()}-tp:0-[0-1]-cpushm_0"  # vLLM's workers' on a CPU
        workers.write_text("x")
        with workers.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 1)  # so that other tests see that it is in use
        socket.socket(socket.AF_UNIX).bind(str(folder / "engine.sock"))
        time.sleep(1.5)  # the guardian looks every second
        while not unmarked.exists():
            time.sleep(0.05)
        report(folder, f"/dev/shm/{memory.name} {workers}")
        if "fail" in sys.argv and os.environ["RANK"] == "1":
            while not (Path(sys.argv[1]) / "0").exists():
                time.sleep(0.05)
            raise ValueError("rank 1 is broken")
        if "clean" in sys.argv:
            return 0
        if "stuck" in sys.argv:
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    continue
        time.sleep(1000)

    def judge(folder):
        import asyncio
        from trainer.config.schema import RewardConfig
        from trainer.rewards import RewardPool
        with RewardPool(RewardConfig(functions=[{"name": f"{__file__}:starts"}], workers=1, timeout_s=60)) as pool:
            result = asyncio.run(pool.score(prompt="", completion="", row={}, finish_reason="stop"))
            assert result.reward == 1.0, result
            report(folder, "")
            time.sleep(1000)

    def starts(completion):
        mark = "0." + os.environ["HOTBUNK_TEST_RUN"]
        subprocess.run(["sh", "-c", f"setsid sleep 1000 {mark} &"], env={"PATH": os.environ["PATH"]})
        return 1.0

    def report(folder, files):
        ready = Path(sys.argv[1]) / os.environ.get("RANK", "0")
        ready.with_suffix(".tmp").write_text(f"{os.getpid()} {folder} {files}")
        ready.with_suffix(".tmp").rename(ready)

    if __name__ == "__main__":
        processes.run(main)
"""


class Run:
    """A launched run: its launcher, and the processes and paths that each of its ranks has reported."""

    def __init__(self, folder: Path, *modes: str, ranks: int = 2, torchrun: bool = True) -> None:
        script = folder / "rank.py"
        script.write_text(textwrap.dedent(RANK))
        self.log = folder / "log"
        launch = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            if torchrun
            else []
        )
        command = [
            *(PYTHON if torchrun else [sys.executable]),
            *launch,
            str(script),
            str(folder),
            *modes,
        ]
        self.mark = str(uuid.uuid4().int)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HOTBUNK_TEST_RUN": self.mark,
            "TMPDIR": str(folder),
        }
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        files = [folder / str(rank) for rank in range(ranks)]
        assert wait_until(lambda: all(file.exists() for file in files), 180), self.log.read_text()
        reports = [file.read_text().split() for file in files]
        self.pids = [int(words[0]) for words in reports]
        self.paths = [Path(path) for words in reports for path in words[1:]]

    def left(self) -> list[str]:
        """List what is left: processes with the mark in environment or arguments, and files."""
        remains = [str(path) for path in self.paths if path.exists()]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.mark in " ".join([*process.environ().values(), *process.cmdline()]):
                    remains += [f"{process.pid} {process.name()}"] * (
                        process.status() != psutil.STATUS_ZOMBIE
                    )
        return remains

    def guardians(self, rank: int) -> list[psutil.Process]:
        """Return the inner and the outer guardian of a rank."""
        return psutil.Process(self.pids[rank]).parents()[:2]


def wait_until(condition, seconds: float) -> bool:
    """Polls the condition until it is true or `seconds` have passed; returns whether it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def check_nothing_left(run: Run) -> str:
    """Wait for the end of the run and of all that it has started, at most DEADLINE; return the log."""
    assert len(run.paths) > 0
    assert wait_until(lambda: run.launcher.poll() is not None and not run.left(), DEADLINE), (
        run.left(),
        run.log.read_text(),
    )
    return run.log.read_text()


@pytest.mark.parametrize("mode", ["early", "steady"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_signalled(
    tmp_path: Path, number: signal.Signals, mode: str
) -> None:
    run = Run(tmp_path, mode)
    if mode == "steady":
        # The launcher and its resource tracker; for each rank itself, two guardians, two workers, three sleepers,
        # another resource tracker, and three paths.
        assert len(run.left()) == 2 + 2 * (9 + 3)
    run.launcher.send_signal(number)
    log = check_nothing_left(run)
    assert run.launcher.returncode != 0
    if number != signal.SIGKILL:
        for rank in (0, 1):
            assert f"rank {rank}: interrupted by {number.name} during phase rollout" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_one_rank_is_signalled(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path, "steady")
    os.kill(run.pids[1], number)
    log = check_nothing_left(run)
    assert run.launcher.returncode != 0
    assert (
        f"rank 1: interrupted by {number.name} during phase rollout" in log or number == signal.SIGKILL
    )
    assert "rank 0: interrupted by SIGTERM during phase rollout" in log  # torchrun passes the signal on


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("which", ["inner", "outer"])
def test_nothing_is_left_when_a_guardian_is_signalled(
    tmp_path: Path, which: str, number: signal.Signals
) -> None:
    run = Run(tmp_path, "steady")
    run.guardians(1)[["inner", "outer"].index(which)].send_signal(number)
    log = check_nothing_left(run)
    assert run.launcher.returncode != 0
    assert (
        f"rank 1: interrupted by {number.name} during phase rollout" in log or number == signal.SIGKILL
    )


def test_nothing_of_a_reward_is_left_when_all_above_its_rank_are_killed(tmp_path: Path) -> None:
    """No launcher or guardian is there to end what a reward function has started in a session of its own."""
    run = Run(tmp_path, "reward", ranks=1)
    sleepers = lambda: [line for line in run.left() if line.endswith(" sleep")]  # noqa: E731
    assert wait_until(lambda: len(sleepers()) == 1, DEADLINE), run.left()
    above = [psutil.Process(run.launcher.pid), *run.guardians(0)]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none notices another's end
        for process in above:
            process.send_signal(number)
    processes = lambda: [line for line in run.left() if not line.startswith("/")]  # noqa: E731
    assert wait_until(lambda: run.launcher.poll() is not None and not processes(), DEADLINE), processes()


def test_nothing_is_left_when_one_rank_raises(tmp_path: Path) -> None:
    run = Run(tmp_path, "fail")
    log = check_nothing_left(run)
    assert run.launcher.returncode != 0
    assert "ValueError: rank 1 is broken" in log


def test_nothing_is_left_after_a_clean_end(tmp_path: Path) -> None:
    run = Run(tmp_path, "clean")
    log = check_nothing_left(run)
    assert run.launcher.returncode == 0, log


def test_a_rank_that_ignores_the_signal_prints_its_stacks_and_is_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "stuck", ranks=1, torchrun=False)
    run.launcher.send_signal(signal.SIGTERM)
    log = check_nothing_left(run)
    assert run.launcher.returncode == 128 + signal.SIGTERM
    assert "still in phase rollout 3 s after the signal" in log
    assert "in main" in log  # the stack of the main thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_names_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path, "steady", ranks=1, torchrun=False)
    run.launcher.send_signal(number)
    check_nothing_left(run)
    assert run.launcher.returncode == 128 + number


def test_a_rank_whose_launcher_is_already_dead_ends_at_once(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    for launcher, expected in ((os.getpid(), "lives\n"), (dead.pid, "")):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TORCHELASTIC_RUN_ID": "x",
            "HOTBUNK_LAUNCHER": str(launcher),
        }
        code = "from trainer.run import processes; processes.start_guardian(); print('lives')"
        rank = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (rank.stdout, rank.returncode) == (expected, 0 if expected else -signal.SIGKILL), (
            rank.stderr
        )


WAITING = """
from trainer.distributed import init_process_group
from trainer.run import processes
processes.start_guardian()
processes.run(lambda: init_process_group(600, "cpu"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_others_to_start_is_ended_by_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The rank waits in C++, where no Python signal handler runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TMPDIR": str(tmp_path),
    }
    rank = subprocess.Popen([*PYTHON, "-c", WAITING], env=environment, start_new_session=True)
    try:
        assert wait_until(lambda: connects(port), 180)
        rank.send_signal(number)
        assert rank.wait(DEADLINE) == -number
    finally:
        rank.kill()  # its guardians end with it
    assert not list(tmp_path.glob("hotbunk-*"))


def connects(port: int) -> bool:
    """Tell whether a connection to this port can be made."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


HELD = """
    import sys, threading, time
    from trainer.run import processes

    asked, worth = threading.Event(), sys.argv[1] != "pointless"

    def main():
        processes.install_signal_handlers(lambda: "rollout")
        held = (15, 2) if sys.argv[1] == "in time" else (15,)
        processes.hold_signals(2.0 if sys.argv[1] == "late" else 60.0, lambda: asked.set() or worth, held)
        print("ready", flush=True)
        asked.wait()
        if sys.argv[1] == "in time":
            print("finished and saved", flush=True)
            processes.interrupt_now()
        time.sleep(1000)

    if __name__ == "__main__":
        processes.run(main)
"""


@pytest.mark.parametrize(
    ("case", "signals"),
    [
        ("in time", [signal.SIGTERM]),
        ("in time", [signal.SIGINT]),  # held, too, if `hold_signals` names it
        ("late", [signal.SIGTERM]),  # the work takes longer than the signal is held
        ("pointless", [signal.SIGTERM]),  # as after the death of a rank
        ("impatient", [signal.SIGTERM, signal.SIGTERM]),
        ("impatient", [signal.SIGTERM, signal.SIGINT]),
        ("at once", [signal.SIGINT]),
    ],
)
def test_a_held_sigterm_leaves_time_to_save_but_no_more(
    tmp_path: Path, case: str, signals: list[signal.Signals]
) -> None:
    script = tmp_path / "held.py"
    script.write_text(textwrap.dedent(HELD))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*PYTHON, str(script), case],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in signals:
        process.send_signal(number)
        time.sleep(1.2 if len(signals) > 1 else 0)  # an earlier signal would count as the same request
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signals[-1]
    assert ("finished and saved" in output) == (case == "in time")
    assert "still in phase" not in output  # the main thread has ended by itself


def test_the_end_of_a_run_does_not_touch_another_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = Run(tmp_path / "a", "steady", ranks=1), Run(tmp_path / "b", "steady", ranks=1)
    before = second.left()
    first.launcher.kill()
    check_nothing_left(first)
    assert sorted(second.left()) == sorted(before)
    second.launcher.kill()
    check_nothing_left(second)
