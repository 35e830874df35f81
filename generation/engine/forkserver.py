"""Engine cores on CPU are forked from what this process has imported, instead of importing it again for 10 s.

vLLM starts a core by Python's `spawn`. Here it is Python's own fork server that starts them, itself forked from this
process before that has threads, a process group or anything of the policy: a copy of those could hang a core, or keep
a store open. Cores so begin with the modules, and with nothing else; their workers are forked in the same way.

On CUDA they are spawned, as nothing that was forked from a process which has counted its devices can use them
(https://github.com/pytorch/pytorch/issues/40403).
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
"""Modules that a process which starts an engine, and its core, take long to import."""

_STARTING = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")  # start engine cores and their workers
_PR_SET_PDEATHSIG = 1
_ERROR = 2  # of c10/util/logging_is_not_google_glog.h


_kept: list[Any] = []
"""Signal handlers of the process that was forked, in the server and in cores: replacing one would drop the last
reference to what it holds, such as Ray's client, whose destructor waits for threads that a fork does not have."""

_server: Any = multiprocessing.forkserver.ForkServer()  # beside the one that others may use in this process
_server.ensure_running = lambda: None


class _CoreProcess(ForkServerProcess):
    """A process of an engine core, forked from the server; spawned where the server has been killed."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        if not _runs(_server._forkserver_pid):
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        original = multiprocessing.forkserver.connect_to_new_process
        multiprocessing.forkserver.connect_to_new_process = _server.connect_to_new_process
        try:
            return ForkServerProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            multiprocessing.forkserver.connect_to_new_process = original


class _Context(ForkServerContext):
    """A context whose processes have the environment of the one that starts them, as spawned ones have."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., Any], kwargs: dict[str, Any], name: str | None = None, daemon: bool | None = None
    ) -> ForkServerProcess:
        return _CoreProcess(target=_begin, args=(dict(os.environ), target), kwargs=kwargs, name=name, daemon=daemon)


def _runs(pid: int) -> bool:
    """Return False if the server has been killed: processes are spawned then."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _begin(environment: dict[str, str], target: Callable[..., Any], **kwargs: Any) -> None:
    """Run a core. What libraries read from the environment as they are imported is read again."""
    # A core ends with the server, and the server with the rank. A core whose guardians were killed would otherwise keep
    # the rank's descriptors open, and with them the lock of the run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _runs(_server._forkserver_pid):
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
    # At its end a core collects everything (vllm/v1/engine/core.py, shutdown): it would copy all that it shares.
    gc.unfreeze = lambda: None
    target(**kwargs)


def prepare() -> None:
    """Do once what each core does at its start, to the same end: half of the time that takes."""
    import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    platform: Any = import_module("vllm.platforms").current_platform
    with warnings.catch_warnings(action="ignore"):  # it looks at all of all modules (vllm/triton_utils/dispatcher.py)
        platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = lambda: None


def start() -> None:
    """Have vLLM's cores forked from this process as it is now. Call it before there are other threads."""
    import setproctitle

    with without_collections():
        for name in MODULES:
            import_module(name)
    setproctitle.getproctitle()  # it finds a process's name only before the environment is touched
    context = _Context()
    for name in _STARTING:
        import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    parent_pid, listener = os.getpid(), socket.socket(socket.AF_UNIX)
    listener.bind(arbitrary_address("AF_UNIX"))  # in a folder that is this user's alone: what it is told is unpickled
    listener.listen()
    _server._forkserver_address = listener.getsockname()
    alive, held = os.pipe()  # the server ends when all have ended that hold the other end
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not (copy := os.fork()):
        try:
            os.close(held)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent_pid:
                _kept.extend(map(signal.getsignal, signal.valid_signals()))
                prepare()
                gc.freeze()  # a collection would touch, and so copy, everything
                setproctitle.setproctitle("hotbunk: forkserver")
                _server._forkserver_pid = os.getpid()
                multiprocessing.forkserver.main(listener.detach(), alive, [])  # type: ignore[attr-defined]
        finally:
            os._exit(0)
    _server._forkserver_alive_fd, _server._forkserver_pid = held, copy
    listener.close()
    os.close(alive)


def stop() -> None:
    """End the server, if it was started; cores that are started later are spawned."""
    if _server._forkserver_pid is None:
        return
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(_server._forkserver_pid, signal.SIGKILL)
        os.waitpid(_server._forkserver_pid, 0)
