"""Staging, and shards that workers read, over a fake of torch's CUDA IPC that counts users as torch does: every export
is opened, closed and freed.
"""

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharding.transports import pull
from sharding.wire import channel as channels
from sharding.wire.channel import SyncError
from sharding.wire.staging import CudaIpcStaging, stamp
from sharding.worker.receiver import ChannelCarrier, StagedBuckets
from sharding.worker.shards import MappedShards

CPU = torch.device("cpu")
NBYTES = 64


class FakeIpc:
    """torch's bookkeeping (torch/csrc/CudaIPCTypes.cpp) over memory of this process.

    An exported storage has a counter that begins at 1. Dropping an opened one takes 1 off; it is unsigned, and only 0
    lets the sender free the memory. What the sender drops before stays in limbo until it collects.
    """

    def __init__(self) -> None:
        self.counters: dict[bytes, int] = {}
        self.places: dict[bytes, int] = {}
        self.limbo: set[bytes] = set()
        self._blocks: list[Any] = []
        self.exports = self.opens = self.closes = 0

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        self.exports += 1
        name = b"/export/%d" % self.exports
        self.counters[name] = 1
        self.places[name] = storage.data_ptr()
        weakref.finalize(storage, self.limbo.add, name)
        return (0, b"handle of " + name, storage.nbytes(), 0, name, 0, b"event", True)

    def open(
        self,
        device: int,
        handle: bytes,
        nbytes: int,
        offset: int,
        name: bytes,
        at: int,
        event: bytes,
        wait: bool,
    ) -> torch.UntypedStorage:
        assert type(handle) is type(name) is type(event) is bytes and isinstance(wait, bool)
        assert self.counters[name] == 1, "an export can be opened once"
        self.opens += 1
        memory = (ctypes.c_char * nbytes).from_address(self.places[name])
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        weakref.finalize(storage, self._close, name)
        return storage

    def _close(self, name: bytes) -> None:
        self.closes += 1
        self.counters[name] = (self.counters[name] - 1) % 2**64

    def collect(self) -> None:
        self.limbo -= {name for name in self.limbo if self.counters[name] == 0}

    def empty(self, size: int, dtype: torch.dtype = torch.uint8, device: object = None) -> torch.Tensor:
        """Allocate device memory; the device keeps its blocks."""
        if not size:
            return torch.tensor([], dtype=dtype)
        self._blocks.append(ctypes.create_string_buffer(size))
        return torch.frombuffer(self._blocks[-1], dtype=dtype)

    def assert_all_is_freed(self) -> None:
        gc.collect()
        self.collect()
        assert self.exports == self.opens == self.closes
        assert not self.limbo


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    fake = FakeIpc()
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_cuda_", lambda storage: fake.share(storage), raising=False
    )
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fake.open, raising=False)
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(torch.cuda, "ipc_collect", fake.collect)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return fake


class Script:
    """A channel that delivers scripted messages through the real packing."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.answers: list[str] = []

    def say(self, kind: str, **fields: Any) -> None:
        self.messages.append(channels.pack(kind, session=1, **fields))

    def receive(self, timeout: float, waiting_for: str) -> dict[str, Any]:
        return channels.unpack(self.messages.pop(0), waiting_for)

    def send(self, kind: str, **fields: Any) -> None:
        self.answers.append(kind)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def buckets() -> StagedBuckets:
    """Return the buckets of a worker on CUDA, so that it collects them as it would there."""
    return StagedBuckets(SimpleNamespace(device=torch.device("cuda", 0)))


@pytest.fixture
def carrier(script: Script, buckets: StagedBuckets) -> ChannelCarrier:
    carrier = ChannelCarrier(script, buckets, "the trainer")  # type: ignore[arg-type]
    carrier.start(1, 5)
    return carrier


def announce(staging: CudaIpcStaging, script: Script, number: int) -> None:
    stamp(staging.buffers[number % 2], number)
    script.say("bucket", handle=staging.handle, buffer=number % 2, nbytes=NBYTES - 8, stamp=number)


def test_a_whole_update_opens_and_closes_each_export_once(
    ipc: FakeIpc, script: Script, carrier: ChannelCarrier, buckets: StagedBuckets
) -> None:
    staging = CudaIpcStaging(NBYTES, CPU)
    staging.export()
    staging.export()
    for number in range(4):
        announce(staging, script, number)
        carrier.bucket(carrier.next())
    script.say("end", close=True)
    carrier.leave(carrier.next())
    staging.close()
    assert (buckets.opened, buckets.closed, ipc.exports) == (1, 1, 2)
    ipc.assert_all_is_freed()


def test_staging_that_nobody_will_open_is_freed_at_once(ipc: FakeIpc) -> None:
    staging = CudaIpcStaging(NBYTES, CPU)
    staging.close()
    assert ipc.exports == 0
    ipc.assert_all_is_freed()


def test_a_bucket_that_fails_in_the_loader_leaves_nothing_mapped(
    ipc: FakeIpc, script: Script, carrier: ChannelCarrier, buckets: StagedBuckets
) -> None:
    staging = CudaIpcStaging(NBYTES, CPU)
    staging.export()
    announce(staging, script, 0)

    def load(buffer: torch.Tensor) -> None:
        view = buffer[8:24]
        try:
            view.view(3, 7)
        except RuntimeError as error:
            raise ValueError("this weight does not fit") from error

    try:
        load(carrier.bucket(carrier.next()))
    except ValueError as error:
        carrier.fail(error)
        assert ipc.closes == 2, "closed before the trainer is told so"
    assert script.answers == ["failed"] and buckets.closed == 1
    staging.close()
    ipc.assert_all_is_freed()


def test_shards_are_opened_once_by_each_worker_and_freed_when_all_have_let_go(
    ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage of two shards and one of one, read in ten updates by two workers; then another policy's."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(pull, "wait_for_writes", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: ipc.empty(size, dtype).zero_())
    both, alone = ipc.empty(NBYTES).view(torch.float32), ipc.empty(NBYTES).view(torch.float32)
    shards = {"a": both[:4], "b": both[4:], "c": alone}
    export = pull.Export(lambda: shards, [both, alone], device)
    assert export.ranges == {"a": [0, 0, 4], "b": [0, 16, 12], "c": [1, 0, 16]}
    workers, handles = [MappedShards(device), MappedShards(device)], [export.handle(), export.handle()]
    for number in range(1, 11):
        both.fill_(number)
        alone.fill_(-number)
        export.stamp(number)
        for worker, handle in zip(workers, handles, strict=True):
            parts = [
                [name, "float32", 0, stretch[2], 0, *stretch[:2]]
                for name, stretch in export.ranges.items()
            ]
            message = {"sources": [{"rank": 3, "handle": handle, "stamp": number}], "parts": parts}
            for name, _, values in worker.parts(message):
                assert (values == (-number if name == "c" else number)).all() and values.numel() == len(
                    shards[name]
                )
            worker.check(message, "changed")
    assert (ipc.exports, ipc.opens, ipc.closes) == (6, 6, 0)
    export.stamp(0)
    with pytest.raises(SyncError, match="rank 3's shards is gone .it bears the stamp 0, not 10."):
        worker.check(message, "is gone")
    del values, worker, message
    for mapped in workers:
        mapped.close()
    del export, both, alone, mapped
    shards.clear()
    workers.clear()
    ipc.assert_all_is_freed()
