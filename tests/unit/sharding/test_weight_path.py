"""Plan, staging, channel: the weight path's parts, each by itself."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.send.buckets import ALIGNMENT, BucketPlan
from sharding.send.source import LARGE_BYTES, FsdpWeightSource, _batches
from sharding.wire.channel import Listener, SyncError, connect
from sharding.wire.manifest import Piece, SourceParameter
from sharding.wire.staging import (
    BUFFERS,
    SharedMemoryStaging,
    make_staging,
    open_memory,
    release_pages,
    stamp,
    stamped,
)
from sharding.worker.recording import LoadWatcher, storage_key
from sharding.workers import Link
from tests.conftest import ROOT
from tests.support import shared_memory


def parameter(number: int, nbytes: int) -> SourceParameter:
    return SourceParameter(f"p{number}", nbytes, (Piece(f"p{number}", "uint8", (nbytes,), 0),))


@settings(max_examples=200)
@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(ALIGNMENT, 8000))
def test_buckets_hold_every_parameter_once_in_order_within_their_bound(
    sizes: list[int], bound: int
) -> None:
    plan = BucketPlan([parameter(i, size) for i, size in enumerate(sizes)], bound)
    assert [piece.name for bucket in plan.buckets for piece in bucket.pieces()] == [
        f"p{i}" for i in range(len(sizes))
    ]
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            assert slot.offset % ALIGNMENT == 0
            end = slot.offset + slot.parameter.nbytes
        assert end <= bucket.nbytes <= plan.capacity
        assert bucket.nbytes <= bound or len(bucket.slots) == 1
    largest = max((math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes), default=0)
    assert plan.capacity <= max(bound, largest)


def test_a_bucket_smaller_than_its_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller than the alignment"):
        BucketPlan([], ALIGNMENT - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_sent_equal_the_master_cast_once(dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5), "c": torch.randn(2, 2, 2)}
    source = FsdpWeightSource(list(tensors.items()), dtype)
    described = {p.name: p for p in source.parameters()}
    slots = [torch.full((described[n].nbytes,), 255, dtype=torch.uint8) for n in tensors]
    source.gather_into(list(tensors), slots)
    for (name, tensor), slot in zip(tensors.items(), slots, strict=True):
        assert torch.equal(slot.view(dtype).view(tensor.shape), tensor.to(dtype))
        assert described[name].nbytes == tensor.numel() * dtype.itemsize


def test_small_parameters_of_a_bucket_share_a_collective() -> None:
    sizes = {"embed": LARGE_BYTES + 1, "norm": 64, "up": 2 * LARGE_BYTES, "down": LARGE_BYTES}
    pairs = [(name, torch.empty(size, dtype=torch.uint8)) for name, size in sizes.items()]
    names = [[name for name, _ in batch] for batch in _batches(pairs)]
    assert names == [["embed"], ["up"], ["norm", "down"]]
    assert _batches(pairs[:1]) == [pairs[:1]] and _batches([]) == []


def test_a_layout_that_does_not_cover_its_parameter_is_refused() -> None:
    source = FsdpWeightSource([("w", torch.zeros(4, 4))], torch.float32, lambda n, s: [(n, 0, (4, 2))])
    with pytest.raises(ValueError, match="does not cover"):
        source.parameters()


READER = """
import json, sys
from sharding.wire.staging import open_memory, stamped
import torch
buffers = open_memory(json.loads(sys.argv[1]), torch.device("cpu"))
print([int(b.long().sum()) for b in buffers], [stamped(b) for b in buffers])
buffers[0][0] = 77
"""


def test_another_process_sees_the_staging_memory_and_nothing_is_left_of_it() -> None:
    before = shared_memory.files()
    staging = make_staging(1000, torch.device("cpu"))
    for number, buffer in enumerate(staging.buffers):
        buffer.zero_()
        buffer[:10] = number + 1
        stamp(buffer, 40 + number)
    shared_memory.assert_none_left(before)
    command = [sys.executable, "-c", READER, json.dumps(staging.handle)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[50, 61] [40, 41]"  # ten ones or twos, and the stamp's own byte
    assert staging.buffers[0][0] == 77  # one memory, not a copy
    staging.close()
    with pytest.raises(OSError):
        open_memory(staging.handle, torch.device("cpu"))


def test_two_stagings_never_pass_for_one_even_with_the_same_descriptor() -> None:
    first = SharedMemoryStaging(64)
    handle = first.handle
    keeps_memory = open_memory(handle, torch.device("cpu"))
    first.close()
    spare = [os.dup(0)]
    while spare[-1] < handle["fd"]:  # what else has ended here may have left lower ones
        spare.append(os.dup(0))
    os.close(spare.pop())
    second = SharedMemoryStaging(64)
    for descriptor in spare:
        os.close(descriptor)
    assert second.handle["fd"] == handle["fd"]
    assert second.handle != handle
    stamp(second.buffers[0], 9)
    assert stamped(keeps_memory[0]) != 9
    assert len(second.buffers) == BUFFERS
    second.close()


def test_a_stranger_without_the_secret_is_refused_and_named(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "socket")
    stranger = connect(listener.endpoint, "guessed", "cpu:0", pid=4242)
    with pytest.raises(SyncError, match=r"stranger \(pid 4242\)"):
        listener.accept(5, "cpu:0")
    stranger.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_on_another_device_is_refused_and_both_are_named(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "socket")
    worker = connect(listener.endpoint, listener.secret, "GPU-b", pid=1)
    with pytest.raises(SyncError, match="GPU-b connected to the rank on GPU-a"):
        listener.accept(5, "GPU-a")
    worker.close()
    listener.close()


def test_waiting_for_a_worker_has_a_deadline_and_notices_its_death(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "socket")
    with pytest.raises(TimeoutError, match="no answer from nobody within 0 s"):
        listener.receive(0.3, "answer from nobody")

    def dead() -> None:
        raise SyncError("the engine died")

    with pytest.raises(SyncError, match="the engine died"):
        listener.receive(30, "answer", dead)
    listener.close()


def test_sending_to_a_worker_that_has_gone_fails_without_waiting(tmp_path: Path) -> None:
    listener = Listener(tmp_path, "weights-0")
    worker = subprocess.Popen(
        [sys.executable, "-c", HELLO, listener.endpoint, listener.secret], cwd=ROOT
    )
    listener.accept(30, "cpu:0")
    link = Link(listener, 1, 30.0, lambda: None, "cpu:0")
    link.post("begin")
    assert link.error is None
    worker.kill()
    worker.wait()
    while link.error is None:  # until the socket has noticed
        link.post("bucket")
    assert isinstance(link.error, SyncError)
    assert "worker on cpu:0 cannot be reached" in str(link.error)
    link.abort()
    listener.close()


HELLO = """
import sys, time
from sharding.wire.channel import connect
channel = connect(sys.argv[1], sys.argv[2], "cpu:0", 1)
time.sleep(60)
"""


def test_the_watcher_accounts_for_views_casts_fills_and_parts() -> None:
    weights = {
        "whole": torch.randn(4, 4),
        "cast": torch.randn(6),
        "part": torch.randn(8),
        "unread": torch.randn(3),
    }
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()} | {
        "padded": torch.zeros(10)
    }
    watcher = LoadWatcher()
    watcher.expect(list(weights.items()))
    with watcher:
        targets["whole"][:2].copy_(weights["whole"].narrow(0, 0, 2))
        targets["whole"][2:].copy_(weights["whole"][2:])
        targets["cast"].copy_(weights["cast"].double())
        targets["part"][:3].copy_(weights["part"][5:])
        targets["padded"][:8].copy_(weights["part"])
        targets["padded"][8:].fill_(0)
        targets["unread"].copy_(torch.ones(3))
    written = {name: watcher.written.get(storage_key(tensor)) for name, tensor in targets.items()}
    assert watcher.read == {"whole", "cast", "part"}
    assert {n: (w.written, w.elements) for n, w in written.items() if w} == {
        "whole": (16, 16),
        "cast": (6, 6),
        "part": (3, 8),
        "padded": (10, 10),
    }
    watcher.comparing = True
    targets["whole"][3, 3] += 1
    with watcher:
        targets["whole"].copy_(weights["whole"])
        targets["cast"].copy_(weights["cast"])
    assert watcher.different == {"whole"}
    assert targets["whole"][3, 3] != weights["whole"][3, 3]  # compared, not mended


def test_released_pages_are_zeros_and_neighbours_are_untouched() -> None:
    big, small = torch.ones(1 << 20), torch.ones(10)
    view = big[100:200]
    freed = release_pages([big, view, small])
    assert freed <= big.nbytes
    assert freed > big.nbytes - 2 * 4096
    assert big[5000:-5000].sum() == 0
    assert small.sum() == 10


def test_a_worker_opens_device_memory_without_the_event_that_torch_never_frees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No event is needed, since the trainer has synchronised before it posts a bucket."""
    opened: list[tuple[Any, ...]] = []

    def open_shared(*arguments: Any) -> torch.UntypedStorage:
        opened.append(arguments)
        return torch.UntypedStorage(24)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_shared)
    exported = [5, b"handle", 24, 0, b"counter", 8, b"event", True]
    handle = {"kind": "cuda_ipc", "storages": [[16, exported], [16, list(exported)]]}
    assert [buffer.numel() for buffer in open_memory(handle, torch.device("cpu", 0))] == [16, 16]
    assert opened == [(0, b"handle", 24, 0, b"counter", 8, b"event", False)] * BUFFERS
    assert exported[7] is True and exported[0] == 5  # what was received is not changed
