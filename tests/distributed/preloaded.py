"""Processes that are forked from one that has imported everything, for tests of what they compute.

A rank imports for 12 s of CPU time, and the core of its engine for 10 s more: of many runs that would be most of the
time.

    python -m tests.distributed.preloaded --nproc-per-node 2 -m trainer train RECIPE   # what scripts/train.sh ends in
    plant()                                                                            # in a rank: engines are forked

The launcher is the real one, with torchrun's own agent, whose ranks are forked instead of exec'd. What a test does to
processes, and what it learns of them from their command lines, it does to runs of `scripts/train.sh` itself.
"""

import gc
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, NoReturn

import setproctitle

MODULES = ["trainer.loop", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
"""What ranks and engines take long to import."""

_STARTING = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")  # start engine cores and their workers


class _Context(ForkServerContext):
    """Its processes have the environment of the one that starts them, as spawned ones have."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., Any], kwargs: dict[str, Any], name: str | None = None, daemon: bool | None = None
    ) -> ForkServerProcess:
        return ForkServerProcess(
            target=_begin, args=(dict(os.environ), target), kwargs=kwargs, name=name, daemon=daemon
        )


def _begin(environment: dict[str, str], target: Callable[..., Any], **kwargs: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    # At its end a core collects everything (vllm/v1/engine/core.py, shutdown): it would copy all that it shares.
    gc.unfreeze = lambda: None
    target(**kwargs)


def plant() -> None:
    """From now on vLLM's engines are forked from this process as it is now: call it before there are other threads."""
    context = _Context()
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    for name in _STARTING:
        import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    server.ensure_running = lambda: None  # it runs: also as a core sees it that starts workers
    own, listener = os.getpid(), socket.socket(socket.AF_UNIX)
    listener.bind(f"\0hotbunk-test-{own}")
    listener.listen()
    alive, held = os.pipe()  # the seed ends when all have ended that hold the other end
    if not (seed := os.fork()):
        from trainer.run import processes

        try:
            os.close(held)
            processes.die_with(own)
            multiprocessing.forkserver.main(listener.detach(), alive, [])  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = listener.getsockname(), held, seed
    listener.close()
    os.close(alive)


def _fork_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """In place of torchrun's `SubprocessHandler._popen`."""

    class Forked(subprocess.Popen[bytes]):
        def _execute_child(self, *_: Any) -> None:
            sys.stdout.flush()
            self.pid = os.fork()
            self._child_created = True
            if not self.pid:
                _be_rank(args[args.index("-m") + 1 :], env)

    return Forked(args)


def _be_rank(args: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    code: Any = 1
    try:
        gc.freeze()
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        from trainer.run import processes

        guarded = processes.start_guardian

        def start_guardian(*kept: int) -> Any:
            folder = guarded(*kept)
            plant()
            return folder

        processes.start_guardian = start_guardian
        sys.argv = list(args)
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    for module in MODULES:
        import_module(module)
    setproctitle.getproctitle()  # it finds a process's name only before the environment is touched
    SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign, assignment]
    runpy.run_module("trainer.launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import_module("tests.distributed.preloaded").main()  # what is pickled must be found again under that name
