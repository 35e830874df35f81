"""Fork the launcher and the ranks of runs from a process that has imported everything, for tests of what runs compute.

A rank imports for 10 s of CPU time, which would be most of a short run. Here a server has done it
(`tests/support/forked.py`); the ranks of `launch.py` come from the same server.

The launcher is the real one, with torchrun's own agent, but it forks the ranks and execs nothing. Runs of
`scripts/train.sh` itself test how runs start otherwise, and how processes read their command lines.
"""

import gc
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import setproctitle
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from generation import guardian
from generation.engine import forkserver
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]

MODULES = [
    __name__,
    "pytest",
    "trainer.rank",
    "torch.distributed.run",
    *forkserver.MODULES,
    "datasets",
    "trainer.policy.vision",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
]
"""Modules that the server imports."""

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# Later it would not find the process's name: the environment will have changed
setproctitle.getproctitle()


@contextmanager
def server() -> Iterator[None]:
    """Have `forkserver` fork processes from the server that has imported everything."""
    connect = forked.server().connect_to_new_process
    with patch.object(multiprocessing.forkserver, "connect_to_new_process", connect):
        yield


class Launcher:
    """A launcher, or the supervisor above it, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        process_args = (arguments, environment, log)
        # A daemon, since a failing test would wait for it otherwise.
        self._process = context.Process(target=_be_launcher, args=process_args, daemon=True)
        with server():
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("the launcher", timeout or 0.0)
        return code


def _be_launcher(arguments: list[str], environment: dict[str, str], log: Path) -> NoReturn:
    guardian.die_with(os.getppid())  # the parent is the server, which ends with the tests
    multiprocessing.current_process().daemon = False  # it has children
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = None  # the tests' tracker must not remove the run's shared memory
    os.chdir(ROOT)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert subprocess_handler.Popen is subprocess.Popen
    subprocess.Popen = subprocess_handler.Popen = _Popen  # type: ignore[misc, assignment, attr-defined]
    _be(arguments, environment)


class _Popen(subprocess.Popen[bytes]):
    """A Popen that forks launchers and ranks, and executes everything else."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close: Any,
        keep: Any,
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        begin = args.index("-m") + 1 if args[0] == sys.executable and "-m" in args else 0
        if not begin or args[begin] not in ("trainer", "trainer.launcher"):
            super()._execute_child(args, executable, preexec_fn, close, keep, cwd, env, *rest)  # type: ignore[misc]
            return
        sys.stdout.flush()
        # Python drops exceptions that a signal handler raises in its hooks after a fork. So the parent notes signals
        # here and raises them again afterwards; in the child they stay blocked until then.
        came = list[int]()
        handlers = {
            n: signal.signal(n, lambda number, frame: came.append(number)) for n in _INTERRUPTIONS
        }
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
        self.pid = os.fork()
        if not self.pid:
            _be([*args[begin:]], env, preexec_fn)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for interruption, handler in handlers.items():
            signal.signal(interruption, handler)
        for number in came:
            signal.raise_signal(number)
        self._child_created = True


def _be(
    args: list[str], environment: dict[str, str], preexec: Callable[[], None] | None = None
) -> NoReturn:
    """Continue as `python -m` with these arguments, in a session of its own."""
    code: Any = 1
    try:
        gc.freeze()
        os.setsid()
        for number in _INTERRUPTIONS:
            signal.signal(
                number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if preexec:
            preexec()
        setproctitle.setproctitle(" ".join([sys.executable, "-m", *args]))
        os.environ.clear()
        os.environ.update(environment)
        import_module("tests.support.changing.sitecustomize").change_what_is_loaded()
        if "ray" in args:
            sys.modules.pop("ray", None)
        sys.argv = list(args)
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
