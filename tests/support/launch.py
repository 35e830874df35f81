"""Run a function on several real ranks from a test.

    run_ranks(function, nproc=2, timeout=60, arguments=[str(tmp_path)])

The function lives in an importable file, take strings, and join the process group itself. The test fails, with every
rank's output, if a rank raises or does not reach the function's end; such a test therefore asserts on the ranks.

The ranks are processes with the variables and the store that torchrun gives its own. They are forked from a process
that has imported what they all need, and nothing else: started one by one they would spend most of their time, and of
the suite's, on imports. test_run.py and test_lifetime.py use the real torchrun.
"""

import faulthandler
import gc
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from generation.engine import forkserver
from tests.support import preloaded
from trainer.run import processes

ROOT = Path(__file__).resolve().parents[2]
_DONE = "HOTBUNK_TEST_DONE"  # the folder in which each rank leaves its number at its end
_GRACE_SECONDS = 3.0  # for the other ranks to report and exit when one has failed


def run_ranks(
    target: Callable[..., Any],
    nproc: int,
    timeout: float = 120.0,
    arguments: list[str] | None = None,
    lost: tuple[int, ...] = (),
) -> str:
    """Run a function on `nproc` ranks; return what they printed, stdout and stderr together.

    `lost` are ranks that leave in the middle of the function, for tests of how the remaining ranks react.

    Raises AssertionError with the output when a rank fails, or when `timeout` seconds have passed; then every process
    is killed first.
    """
    # Outlives every rank, as torchrun's does
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as done:
        log = Path(done) / "output"
        log.touch()
        process_args = (environment | {_DONE: done}, log, target, arguments or [])
        with preloaded.server():
            ranks = start_processes(
                _run_rank, process_args, nproc, join=False, start_method="forkserver"
            )
        assert ranks is not None
        failure = _wait(ranks, timeout)
        output = log.read_text(errors="replace")
        ended = [rank for rank in range(nproc) if (Path(done) / str(rank)).exists()]
    assert not failure, f"{failure}:\n{output}"
    assert ended == [rank for rank in range(nproc) if rank not in lost], (
        f"only ranks {ended} came to the end:\n{output}"
    )
    return output


def run_script(script: Path, arguments: list[str], folder: Path, timeout: float) -> str:
    """Run a script in this folder, forked as ranks are, and return what it prints.

    Raises AssertionError with its output if it fails or takes longer than `timeout` seconds.
    """
    log = folder / f"{script.stem}.log"
    process_args = (os.environ | {"PYTHONPATH": str(ROOT)}, log, script, arguments)
    with preloaded.server():
        process = start_processes(_run_script, process_args, 1, join=False, start_method="forkserver")
    assert process is not None
    failure = _wait(process, timeout)
    printed = log.read_text(errors="replace")
    assert not failure, f"{failure}:\n{printed}"
    return printed


def _wait(ranks: ProcessContext, timeout: float) -> str:
    """Wait until all ranks have ended, and return what went wrong, or an empty string. No process is left."""
    deadline = time.monotonic() + timeout
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic()), _GRACE_SECONDS):
            if time.monotonic() >= deadline:
                return f"they took longer than {timeout} s"
    except ProcessExitedException as error:
        return str(error)
    finally:
        for process in ranks.processes:
            _kill_tree(process.pid)
            process.join()
    return ""


def leave() -> NoReturn:
    """End a rank whose process group is broken, and whose exit would hang."""
    _note_end()
    os._exit(0)


def _note_end() -> None:
    (Path(os.environ[_DONE]) / os.environ["RANK"]).touch()


def _kill_tree(pid: int) -> None:
    """Kill a rank and its children, which are in sessions of their own."""
    try:
        family = psutil.Process(pid)
        members = [*family.children(recursive=True), family]
    except psutil.NoSuchProcess:
        return
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _run_rank(
    rank: int, environment: dict[str, str], log: Path, target: Callable[..., Any], arguments: list[str]
) -> NoReturn:
    """Run a rank from its first line to its end."""
    _begin(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, ROOT, log)
    forkserver.start()

    def main() -> int:
        target(*arguments)
        _note_end()
        return 0

    # A rank exits as the command line's ranks do: the interpreter's own shutdown now and then aborts in the destructor
    # of a gloo group that a device mesh still holds ("terminate called without an active exception").
    processes.run(main)


def _run_script(
    _: int, environment: dict[str, str], log: Path, script: Path, arguments: list[str]
) -> NoReturn:
    _begin(environment, log.parent, log)
    forkserver.start()
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]

    def main() -> int:
        runpy.run_path(str(script), run_name="__main__")
        return 0

    processes.run(main)


def _begin(environment: dict[str, str], folder: Path, log: Path) -> None:
    """Set up this process: a session of its own, the environment, the folder, and `log` for its output."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    gc.freeze()  # a collection of all that was imported would take half a second, and there are many
