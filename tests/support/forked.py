"""Fork the Python processes of tests from servers that have imported everything, which saves most of their time.

One of the two servers finds torchvision; each imports when it is first asked for a process. All processes of pytest
share them, and are forks of them. `python tests/support/forked.py ...` is a forked `python ...`.
"""

import atexit
import fcntl
import gc
import multiprocessing.forkserver
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import process
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, __file__)
"""A command for a forked `python`."""

ENGINES = "HOTBUNK_TEST_ENGINES"
"""The environment variable with which engines started by that command are forked as well."""

_MAIN = process.current_process()
_ADDRESS = "HOTBUNK_TEST_FORKSERVER"


def start_server() -> None:
    """Start the server from this process, the first of pytest's; it ends with it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(arbitrary_address("AF_UNIX"))
    listener.listen()
    ended, _held = os.pipe()  # only this process has the write end
    code = f"import sys; sys.path[:0] = {[str(ROOT)]}; from tests.support.forked import serve"
    code += f"; serve({listener.fileno()}, {ended})"
    quiet = os.environ | {"TORCH_LOGS": "-torch._library.triton"}
    descriptors = (listener.fileno(), ended)
    subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=descriptors, stdin=subprocess.DEVNULL, env=quiet
    )
    os.environ[_ADDRESS] = listener.getsockname()
    os.close(ended)
    listener.close()


def serve(listener: int, ended: int) -> None:
    """Run the server, which imports everything when it is asked for its first process."""
    if ended in select.select([listener, ended], [], [])[0]:
        return
    sys.warnoptions.append("ignore")  # as in `main`
    hidden: Any = None
    # vLLM imports it where it can; it reads its environment as it is imported
    sys.modules["ray"] = hidden
    with suppress(ImportError):  # vLLM is not the build for CPUs
        for name in import_module("tests.support.preloaded").MODULES:
            import_module(name)
        import_module("generation.engine.forkserver").prepare()
    multiprocessing.forkserver.main(listener, ended, [])  # type: ignore[attr-defined]


class _Server(multiprocessing.forkserver.ForkServer):
    """This process's connection to the server."""

    def __init__(self) -> None:
        super().__init__()
        slots: Any = self
        slots._forkserver_address = os.environ[_ADDRESS]
        # unused: the server lives as long as pytest
        slots._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)

    def ensure_running(self) -> None:
        """Do nothing, since the server runs already."""


server = cache(_Server)


class _Streams:
    """Sends standard input, output and error to another process when it is pickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return list, ([DupFd(number) for number in range(3)],)


def main(arguments: Sequence[str]) -> int:
    """Run `python` with these arguments in a fork; signal that this process gets are passed on."""
    # The resource tracker would warn of shared memory of processes that tests kill
    sys.warnoptions.append("ignore")
    multiprocessing.forkserver.connect_to_new_process = server().connect_to_new_process
    handed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    del sys.modules["__main__"].__file__  # otherwise the fork would run this file first
    context = multiprocessing.get_context("forkserver")
    fork = context.Process(
        target=_be_python, args=(_Streams(), list(arguments), dict(os.environ), os.getcwd())
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
    fork.start()
    assert fork.pid is not None
    for number in handed_on:
        signal.signal(number, lambda number, frame: os.kill(fork.pid or 0, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
    fork.join()
    code = fork.exitcode or 0
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _be_python(streams: Any, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    parent: Any = process.parent_process()  # this process is killed with it
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([parent.sentinel], [], [], 0)[0]:
        os._exit(1)
    process._current_process, process._parent_process = _MAIN, None  # type: ignore[attr-defined]
    for number, stream in enumerate(streams):
        os.dup2(stream.detach(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.freeze()
    del sys.modules["ray"]
    if environment.get(ENGINES):
        import_module("generation.engine.forkserver").start()
    while arguments[0] in ("-u", "-B", "-P"):
        del arguments[0]
    place = {"-c": "", "-m": folder}.get(arguments[0], os.path.dirname(os.path.realpath(arguments[0])))
    sys.path[:1] = [] if environment.get("PYTHONSAFEPATH") else [place]
    code: Any = 0
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(arguments[1], module.__dict__)
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(import_module("tests.support.forked").main(sys.argv[1:]))
