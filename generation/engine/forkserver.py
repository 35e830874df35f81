"""Fork engine cores on CPU from a process that has imported vLLM, so that a core does not import it
itself for 10 s.

vLLM starts a core by Python's `spawn`. Here Python's fork server starts cores instead. The server
is itself forked from this process before this process has threads, a process group or parts of the
policy, since a copy of those could hang a core, or keep a store open. Cores therefore begin with
the imported modules and nothing else. Their workers are forked in the same way.

On CUDA, cores are spawned: a process that was forked from one which has counted its CUDA devices
cannot use them (https://github.com/pytorch/pytorch/issues/40403).
"""

import ctypes
import gc
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any

import psutil

from generation.importing import without_collections

MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
)
"""Modules that take long to import, in a process that starts an engine and in the engine's core."""

# They start cores and workers
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
_PR_SET_PDEATHSIG = 1
_ERROR = 2  # the log level GLOG_ERROR of c10/util/logging_is_not_google_glog.h

_signal_handlers: list[Any] = []
"""References, in the server and in cores, to the signal handlers of the process that was forked.

Without them, replacing a handler would drop the last reference to what it holds, such as Ray's
client, whose destructor waits for threads that a fork does not have.
"""

# Not the one that other code in this process may use
_server: Any = multiprocessing.forkserver.ForkServer()
_server.ensure_running = lambda: None


class _CoreProcess(ForkServerProcess):
    """A process of an engine core, forked from the server, or spawned if the server has been
    killed.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        if not _is_running(_server._forkserver_pid):
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        original = multiprocessing.forkserver.connect_to_new_process
        multiprocessing.forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            multiprocessing.forkserver.connect_to_new_process = original


class _Context(ForkServerContext):
    """A multiprocessing context whose processes get their parent's environment, as spawned
    processes do.
    """

    def Process(  # type: ignore[override]
        self,
        *,
        target: Callable[..., Any],
        kwargs: dict[str, Any],
        name: str | None = None,
        daemon: bool | None = None,
    ) -> ForkServerProcess:
        return _CoreProcess(
            target=_run_core, args=(dict(os.environ), target), kwargs=kwargs, name=name, daemon=daemon
        )


def _is_running(pid: int) -> bool:
    """Return True if the process `pid` runs; False if it has ended, even if its parent has not yet
    waited for it.
    """
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _run_core(environment: dict[str, str], target: Callable[..., Any], **kwargs: Any) -> None:
    """Run a core's `target` in `environment`, and apply the variables that libraries read only at
    their import.
    """
    # The kernel ends a core when the server ends, and the server when the rank ends. Without this,
    # if the guardian was killed, a core would outlive them, and would keep the rank's descriptors
    # open, and with them the lock of the run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_running(_server._forkserver_pid):
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    _server._forkserver_alive_fd = server._forkserver_alive_fd  # for workers of this core
    import torch
    import torch._dynamo.config as dynamo

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    dynamo.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if environment.get("TORCH_CPP_LOG_LEVEL") == "ERROR":
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level").value = _ERROR
    gc.freeze()
    # At its end a core unfreezes and collects all objects (vllm/v1/engine/core.py, shutdown), and
    # would thereby copy the memory that it shares with the server.
    gc.unfreeze = lambda: None
    target(**kwargs)


def prepare() -> None:
    """Do the work that every core would do at its start, which takes half of the start, once for
    all cores.
    """
    import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    platform: Any = import_module("vllm.platforms").current_platform
    # It reads every attribute of every module (vllm/triton_utils/dispatcher.py), and some of them
    # warn.
    with warnings.catch_warnings(action="ignore"):
        platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = lambda: None


def start() -> None:
    """Start the server, from which vLLM's cores are forked from now on. Call it before there are
    other threads.
    """
    import setproctitle

    with without_collections():
        for name in MODULES:
            import_module(name)
    setproctitle.getproctitle()  # works only before the environment is changed
    context = _Context()
    for name in _STARTERS:
        import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    parent_pid = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    # In a folder of this user's alone: the server unpickles what it reads
    listener.bind(arbitrary_address("AF_UNIX"))
    listener.listen()
    _server._forkserver_address = listener.getsockname()
    alive, held_open = os.pipe()  # the server ends when every process that holds the other end has ended
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not (server_pid := os.fork()):
        try:
            os.close(held_open)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent_pid:
                _signal_handlers.extend(map(signal.getsignal, signal.valid_signals()))
                prepare()
                gc.freeze()  # a collection would write to, and so copy, all objects
                setproctitle.setproctitle("hotbunk: forkserver")
                _server._forkserver_pid = os.getpid()
                multiprocessing.forkserver.main(listener.detach(), alive, [])  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    _server._forkserver_alive_fd = held_open
    _server._forkserver_pid = server_pid
    listener.close()
    os.close(alive)


def stop() -> None:
    """End the server, if it was started; cores that are started later are spawned."""
    if _server._forkserver_pid is None:
        return
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(_server._forkserver_pid, signal.SIGKILL)
        os.waitpid(_server._forkserver_pid, 0)
