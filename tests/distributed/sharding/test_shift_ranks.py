"""A failure on one rank during an update is raised on all ranks, by name and in time.

Two real ranks have a manager each. In place of an engine there is a process that speaks as its worker does, and can be
killed like one; tests/engine/sharding/test_sync_failures.py has a real worker.
"""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from generation.engine.engine import Engine
from generation.engine.settings import EngineSettings
from tests.support.in_process import IdleLLM
from tests.support.launch import ROOT, leave, run_ranks

WORKER = """
import os, sys
from sharding.wire.channel import connect

endpoint, secret = sys.argv[1:]
channel = connect(endpoint, secret, "cpu:0", os.getpid())
terms = {"plain": False, "views": {}, "whole": None, "records": False}
while True:
    message = channel.receive(120, "message")
    over = message["kind"] in ("end", "abort")
    channel.send("done", session=message["session"], left=over, **(terms if message["kind"] == "begin" else {}))
    if over:
        print("ended", flush=True)
"""


class StandIn(Engine):
    """An engine whose only worker is another process with nothing but its end of a channel."""

    def __init__(self) -> None:
        super().__init__(EngineSettings("none", 64))
        self._llm = IdleLLM()  # type: ignore[assignment]
        self.worker: subprocess.Popen[str]

    def start_worker(self, endpoint: str, secret: str) -> None:
        command = [sys.executable, "-c", WORKER, endpoint, secret]
        self.worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def one_update(self) -> None:
        assert self.worker.stdout is not None
        if self.worker.stdout.readline() != "ended\n":
            raise RuntimeError("the engine core is gone")

    async def call_workers(self, method: str, *arguments: Any, **_: Any) -> list[dict[str, None]]:
        if method == "hotbunk_connect":
            self.start_worker(*arguments[0]["cpu:0"])
        else:
            await asyncio.to_thread(self.one_update)
        return [{"error": None}]


def check_failures(folder: str) -> None:
    """Fail an update in three ways on rank 1, and check the errors on both ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from generation.engine.engine import Leader
    from generation.engine.thread import EngineThread
    from sharding.manager import ShardingManager
    from sharding.ranks import RemoteError, rank
    from sharding.report import SyncReport, SyncSettings
    from sharding.send.source import FsdpWeightSource
    from trainer.distributed import init_process_group

    init_process_group(60, "cpu")
    mesh = init_device_mesh("cpu", (2,))
    tensors = [
        (f"weight.{i}", distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)])) for i in range(6)
    ]
    source, engine = FsdpWeightSource(tensors, torch.float32), StandIn()
    leader = Leader(engine, EngineThread())  # type: ignore[arg-type]
    private = Path(folder) / str(rank())
    private.mkdir(mode=0o700)
    settings = SyncSettings("off", bucket_bytes=4096, timeout=30)
    manager = ShardingManager(source, torch.device("cpu"), settings, private, leader=leader)
    manager.connect()

    def fail(message: str, error: type[Exception] = RemoteError) -> None:
        with pytest.raises(error, match=message):
            manager.report = SyncReport(7)
            manager._sync()
        assert engine.state.version is None

    def on_rank_one(action: Callable[[], None]) -> Any:
        """Call `action` on rank 1 while the third bucket is gathered."""
        calls, gather = [], source.gather_into

        def gather_and_act(names: list[str], slots: list[torch.Tensor]) -> None:
            calls.append(names)
            if rank() == 1 and len(calls) == 3:
                action()
            gather(names, slots)

        return mock.patch.object(source, "gather_into", gather_and_act)

    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, allowed[1]))
    fail(
        "preparing the buffers failed on rank 1: SyncError: no [0-9]+ bytes of shared memory for staging"
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    manager.report = SyncReport(1)
    manager._sync()
    assert engine.state.version == 1

    with on_rank_one(lambda: engine.worker.kill()):  # type: ignore[union-attr]
        fail(
            "sending weights failed on rank 1: SyncError: .*(the engine core is gone|cannot be reached)"
        )
    if rank() == 0:
        assert engine.worker.poll() is None, "the other worker must wait for another update"
    with on_rank_one(lambda: os._exit(0)):  # without a launcher that would end rank 0, too
        fail("rank 0 lost contact with rank 1, whose process [0-9]+ has ended,")
    engine.worker.kill()
    leave()


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """No staging memory, which the next update repairs; a killed worker; a rank that has ended."""
    run_ranks(check_failures, nproc=2, timeout=150, arguments=[str(tmp_path)], lost=(1,))
