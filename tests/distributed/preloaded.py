"""Ranks that are forked from a launcher that has imported everything, for tests of what they compute.

A rank imports for 12 s of CPU time: of many runs that would be most of the time.

    python -m tests.distributed.preloaded --nproc-per-node 2 -m trainer train RECIPE   # what scripts/train.sh ends in

The launcher is the real one, with torchrun's own agent, whose ranks are forked instead of exec'd. What a test does to
processes, and what it learns of them from their command lines, it does to runs of `scripts/train.sh` itself.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any, NoReturn

import setproctitle

from generation.engine import forkserver


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

    for module in ("trainer.loop", *forkserver.MODULES):
        import_module(module)
    setproctitle.getproctitle()  # it finds a process's name only before the environment is touched
    SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign, assignment]
    runpy.run_module("trainer.launcher", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import_module("tests.distributed.preloaded").main()  # what is pickled must be found again under that name
