"""The modules, environment and kernels with which a forked engine core begins."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from generation.engine import forkserver
from tests.conftest import ROOT
from tests.support.forked import PYTHON


def write_state(path: str) -> None:
    """Write the state of this process, which is started in the same way as engine cores."""
    import torch
    from torch._dynamo import config

    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("of a library", stacklevel=1)
    imported = [module for module in forkserver.MODULES if module in sys.modules]
    state = [
        os.getppid(),
        imported,
        os.environ["HOTBUNK_TEST"],
        torch.get_num_threads(),
        config.disable,
        len(caught),
    ]
    Path(path).write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("threads", "disabled", "warnings"), [("2", "0", "default"), ("1", "1", "ignore")]
)
def test_a_forked_core_has_all_modules_and_follows_its_own_environment(
    threads: str, disabled: str, warnings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes variables that a library had already read when the server imported it."""
    from vllm.v1.engine import utils

    changed = {"OMP_NUM_THREADS": threads, "TORCH_COMPILE_DISABLE": disabled, "PYTHONWARNINGS": warnings}
    for name, value in (changed | {"HOTBUNK_TEST": threads}).items():
        monkeypatch.setenv(name, value)
    process = utils.get_mp_context().Process(
        target=write_state, kwargs={"path": str(tmp_path / "state")}, daemon=True
    )
    process.start()
    process.join(60)
    parent, imported, name, *settings = json.loads((tmp_path / "state").read_text())
    assert parent == forkserver._server._forkserver_pid and parent != os.getpid()
    assert imported == list(forkserver.MODULES) and name == threads
    assert settings == [int(threads), disabled == "1", int(warnings != "ignore")]
    assert process.exitcode == 0


def write_kernels(path: str) -> None:
    """Write which of vLLM's Triton kernels are replaced, and whether a worker would search for replacements again."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    with patch.object(dispatcher, "register_kernels") as asked:
        type(current_platform).register_triton_kernel_overrides()
    with patch.object(dispatcher, "_rebind_kernels") as looked:
        current_platform.register_triton_kernel_overrides()
    places = {name: dispatcher._resolve_kernel(name) for name in asked.call_args[0][0]}
    kernels = {name: type(getattr(*place)).__name__ for name, place in places.items()}
    Path(path).write_text(json.dumps([kernels, looked.called]))


def test_a_forked_core_has_the_kernels_that_a_worker_would_replace(tmp_path: Path) -> None:
    from vllm.v1.engine import utils

    process = utils.get_mp_context().Process(
        target=write_kernels, kwargs={"path": str(tmp_path / "state")}, daemon=True
    )
    process.start()
    process.join(60)
    kernels, looked = json.loads((tmp_path / "state").read_text())
    assert len(kernels) > 5 and set(kernels.values()) == {"KernelOverride"}
    assert not looked


HANDLERS = """
import os, signal, sys
from generation.engine import forkserver
from tests.engine.test_forkserver import replace_handler

class Client:
    def __init__(self):
        self.process = os.getpid()
    def __del__(self):
        if os.getpid() != self.process:
            os._exit(7)  # its threads are in the process that made it

def handler_of(client):
    return lambda number, frame: client

signal.signal(signal.SIGTERM, handler_of(Client()))
forkserver.start()
from vllm.v1.engine import utils
core = utils.get_mp_context().Process(target=replace_handler, kwargs={}, daemon=True)
core.start()
core.join(60)
sys.exit(core.exitcode)
"""


def replace_handler() -> None:
    """Replace a signal handler, as a core does first of all (vllm/v1/engine/core.py, run_engine_core)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_objects_of_a_replaced_signal_handler_survive_in_the_fork() -> None:
    """Ray's handler of SIGTERM may hold the last reference to Ray's client."""
    run = subprocess.run(
        [*PYTHON, "-c", HANDLERS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_cores_are_spawned_if_the_server_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import utils

    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(forkserver._server, "_forkserver_pid", gone.pid)
    monkeypatch.setenv("HOTBUNK_TEST", "spawned")
    process = utils.get_mp_context().Process(
        target=write_state, kwargs={"path": str(tmp_path / "state")}, daemon=True
    )
    process.start()
    process.join(120)
    parent, imported, name, *_ = json.loads((tmp_path / "state").read_text())
    assert (parent, imported, name) == (os.getpid(), [], "spawned")
