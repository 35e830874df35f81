"""Carriers of weights by themselves: the folder with two slots, the group's store, manifests, streams of weights."""

import fcntl
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sharding.ranks import RemoteError
from sharding.remote.broadcast import engine_ranks
from sharding.remote.storage import StorageWriter
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource, StreamSource
from sharding.wire.channel import SyncError
from sharding.wire.group import GroupError, GroupStore, StoreChannel, connect_store, listen
from sharding.wire.manifest import (
    Piece,
    SourceParameter,
    check_manifest,
    checkpoint_manifest,
    differences,
    manifest_of,
)
from sharding.worker import weight_folder
from sharding.worker.weight_folder import MANIFEST, StorageCarrier

CPU = torch.device("cpu")


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": (40, 16), "norm": (16,), "up": (64, 16), "bias": (7,), "down": (16, 64)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def writer(folder: Path, tensors: dict[str, torch.Tensor], timeout: float = 30.0) -> StorageWriter:
    return StorageWriter(
        folder, FsdpWeightSource(list(tensors.items()), torch.float32), CPU, 4096, timeout
    )


def read(
    folder: Path, between: Callable[[int], None] = lambda number: None, threads: int = 1
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the version and the weights that a worker would load; `between` is called before each bucket."""
    carrier = StorageCarrier(str(folder), CPU, 5.0, verify=False, threads=threads)
    loaded: dict[str, torch.Tensor] = {}
    version = -1
    try:
        while (message := carrier.next())["kind"] != "end":
            if message["kind"] == "begin":
                version = message["version"]
            elif message["kind"] == "bucket":
                between(message["number"])
                memory = carrier.bucket(message)
                for name, dtype, shape, offset in message["pieces"]:
                    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                    piece = memory[offset : offset + size].view(getattr(torch, dtype)).view(shape)
                    loaded[name] = piece.clone()
            carrier.answer()
    finally:
        carrier.leave({})
    return version, loaded


def assert_equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_every_tensor_read_from_storage_equals_the_one_written(tmp_path: Path) -> None:
    for version in range(4):
        writer(tmp_path, weights(version)).write(version)
        found_version, loaded = read(tmp_path)
        assert found_version == version
        assert_equal(loaded, weights(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "slot-0", "slot-1"]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_each_thread_reads_one_bucket_at_a_time(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of concurrent reads is that of the threads when none of them ends, and every tensor arrives as it was
    written.
    """
    tensors = {f"weight {n}": torch.full((512,), float(n)) for n in range(12)}  # in six buckets
    writer(tmp_path, tensors).write(3)
    plain, at_once, most, changed = weight_folder._read, 0, 0, threading.Condition()

    def reading(*arguments: Any) -> Any:
        nonlocal at_once, most
        with changed:
            at_once, most = at_once + 1, max(most, at_once + 1)
            changed.notify_all()
            changed.wait_for(lambda: most >= min(threads, 6), 10)
        try:
            return plain(*arguments)
        finally:
            with changed:
                at_once -= 1

    monkeypatch.setattr(weight_folder, "_read", reading)
    version, loaded = read(tmp_path, threads=threads)
    assert (version, most) == (3, min(threads, 6))
    assert_equal(loaded, tensors)


def test_a_reader_keeps_its_update_while_the_next_one_is_written(tmp_path: Path) -> None:
    writer(tmp_path, weights(0)).write(0)

    def write_next(number: int) -> None:
        if number == 1:
            writer(tmp_path, weights(1)).write(1)

    version, loaded = read(tmp_path, write_next)
    assert version == 0
    assert_equal(loaded, weights(0))
    assert read(tmp_path)[0] == 1


def test_a_writer_waits_for_the_readers_of_the_slot_it_is_to_write(tmp_path: Path) -> None:
    writer(tmp_path, weights(0)).write(0)
    refused: list[str] = []

    def write_twice(number: int) -> None:
        if number == 1:
            writer(tmp_path, weights(1)).write(1)
            with pytest.raises(RemoteError) as caught:
                writer(tmp_path, weights(2), timeout=0.2).write(2)
            refused.append(str(caught.value))

    version, loaded = read(tmp_path, write_twice)
    assert version == 0
    assert_equal(loaded, weights(0))
    assert "slot-0 is still being read" in refused[0]
    assert read(tmp_path)[0] == 1  # the refused one never existed
    writer(tmp_path, weights(2)).write(2)
    assert_equal(read(tmp_path)[1], weights(2))


def test_a_reader_that_was_overtaken_gets_the_newer_update(tmp_path: Path) -> None:
    """The writer completes two updates between a reader's look at the manifest and its lock on the slot."""
    writer(tmp_path, weights(0)).write(0)
    with (tmp_path / "slot-0").open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answers: list[tuple[int, dict[str, torch.Tensor]]] = []
        reader = threading.Thread(target=lambda: answers.append(read(tmp_path)))
        reader.start()
        time.sleep(0.3)
        writer(tmp_path, weights(1)).write(1)
    reader.join(120)
    assert answers[0][0] == 1
    assert_equal(answers[0][1], weights(1))


def test_a_writer_that_fails_leaves_the_update_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer(tmp_path, weights(0)).write(0)
    monkeypatch.setattr(
        "os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(RemoteError, match="No space left"):
        writer(tmp_path, weights(1)).write(1)
    version, loaded = read(tmp_path)
    assert version == 0
    assert_equal(loaded, weights(0))


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"holds no complete weights: manifest\.json is missing"):
        read(tmp_path)
    writer(tmp_path, weights(0)).write(0)
    slot = tmp_path / json.loads((tmp_path / MANIFEST).read_text())["slot"]
    content = slot.read_bytes()
    slot.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    with pytest.raises(
        SyncError, match=r"bucket \d of .*slot-0, with \w+, is not what was written there"
    ):
        read(tmp_path)
    slot.write_bytes(content[:-600])
    with pytest.raises(SyncError, match="ends inside of bucket"):
        read(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 9}')
    with pytest.raises(SyncError, match="is not a manifest"):
        read(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1, "sl')
    with pytest.raises(SyncError, match="cannot be read"):
        read(tmp_path)


def test_the_manifest_holds_the_digests_of_what_is_on_disk(tmp_path: Path) -> None:
    writer(tmp_path, weights(3)).write(3)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    data = (tmp_path / manifest["slot"]).read_bytes()
    for bucket in manifest["buckets"]:
        part = data[bucket["offset"] : bucket["offset"] + bucket["nbytes"]]
        assert hashlib.blake2b(part).hexdigest() == bucket["digest"]
    assert sum(bucket["nbytes"] for bucket in manifest["buckets"]) == len(data)
    assert manifest["weights"] == {n: [list(t.shape), "float32"] for n, t in weights(3).items()}


def test_ranks_of_engines_in_the_weights_group() -> None:
    assert engine_ranks(2, 2) == (5, [1, 3])
    assert engine_ranks(1, 1) == (2, [1])
    assert engine_ranks(3, 4) == (13, [1, 5, 9])
    for engines, workers in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(ValueError, match="needs engines with workers"):
            engine_ranks(engines, workers)


@given(st.integers(1, 20), st.integers(1, 16))
def test_every_rank_belongs_to_one_member(engines: int, workers: int) -> None:
    world_size, offsets = engine_ranks(engines, workers)
    assert [0, *(first + k for first in offsets for k in range(workers))] == list(range(world_size))


def test_differences_name_every_weight_that_does_not_fit() -> None:
    sent = {"a": [[2, 3], "float32"], "b": [[4], "bfloat16"], "d": [[1], "float32"]}
    expected = {"a": [[3, 2], "float32"], "b": [[4], "float32"], "c": [[5], "float32"]}
    assert differences(sent, sent) == []
    assert differences(sent, expected) == [
        "c is missing",
        "d is not expected",
        "a has shape [2, 3] where [3, 2] is expected",
        "b has dtype bfloat16 where float32 is expected",
    ]
    check_manifest({"a": [[2], "float32"]}, None, ["float32"])
    with pytest.raises(SyncError, match="c is missing; d is not expected"):
        check_manifest(sent, expected, ["float32"])


def test_a_dtype_that_the_engine_would_cast_in_silence_is_refused() -> None:
    with pytest.raises(SyncError, match="w comes as float64, the engine computes in float32"):
        check_manifest({"w": [[2], "float64"]}, None, ["float32"])


def test_two_weights_of_one_name_are_an_error() -> None:
    twice = [SourceParameter(n, 4, (Piece("w", "float32", (1,), 0),)) for n in ("first", "second")]
    with pytest.raises(SyncError, match="two weights of the name w"):
        manifest_of(twice)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoints_manifest_leaves_out_tied_weights(tmp_path: Path, tied: bool) -> None:
    save_file({"embed": torch.zeros(4, 2, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model-2.safetensors")
    expected = {"embed": [[4, 2], "float32"]} | ({} if tied else {"lm_head.weight": [[4, 2], "float32"]})
    assert checkpoint_manifest(str(tmp_path), "float32", tied) == expected
    (tmp_path / "none").mkdir()
    with pytest.raises(SyncError, match="no safetensors files"):
        checkpoint_manifest(str(tmp_path / "none"), "float32", tied)


@settings(max_examples=30)
@given(st.permutations(["embed", "norm", "up", "bias", "down"]), st.integers(512, 9000))
def test_a_stream_in_any_order_sends_the_same_weights(order: list[str], bucket_bytes: int) -> None:
    tensors = weights(5)
    info = {name: [list(tensor.shape), "bfloat16"] for name, tensor in tensors.items()}
    source = StreamSource(info, ((name, tensors[name]) for name in order))
    held = {}
    for bucket in BucketPlan(source.parameters(), bucket_bytes).buckets:
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        slots = [buffer[s.offset : s.offset + s.parameter.nbytes] for s in bucket.slots]
        source.gather_into([s.parameter.name for s in bucket.slots], slots)
        for piece, slot in zip(bucket.pieces(), slots, strict=True):
            held[piece.name] = slot.view(torch.bfloat16).view(piece.shape)
    assert_equal(held, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_a_stream_takes_no_more_than_it_needs_for_a_bucket() -> None:
    tensors, taken = weights(5), []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            taken.append(name)
            yield name, tensor

    source = StreamSource(
        manifest_of(FsdpWeightSource(list(tensors.items()), torch.float32).parameters()), stream()
    )
    source.gather_into(["embed"], [torch.zeros(40 * 16 * 4, dtype=torch.uint8)])
    assert taken == ["embed"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "ended without b"),
        (["a", "a", "b"], "brought a twice"),
        (["a", "c", "b"], "brought c unasked"),
        (["a", "b", "c"], "brought c unasked"),
        (["a", "b", "b"], "brought b twice"),
        (["wide", "b"], "brought wide unasked"),
    ],
)
def test_missing_double_and_strange_weights_of_a_stream_are_named(
    names: list[str], message: str
) -> None:
    source = StreamSource({n: [[2], "float32"] for n in "ab"}, ((n, torch.ones(2)) for n in names))
    with pytest.raises(SyncError, match=message):
        source.gather_into(["a", "b"], [torch.zeros(8, dtype=torch.uint8) for _ in range(2)])


def test_messages_of_the_group_keep_their_order_and_every_wait_ends() -> None:
    store = listen("127.0.0.1", 0, 10)
    trainer, worker = (
        GroupStore(store, "here"),
        GroupStore(connect_store("127.0.0.1", store.port, 10), "here"),
    )
    out, back = StoreChannel(trainer, "to/1", "from/1"), StoreChannel(worker, "from/1", "to/1")
    for number in range(5):
        out.send("bucket", number=number)
    assert [back.receive(5, "bucket")["number"] for _ in range(5)] == list(range(5))
    assert not back.waiting()
    with pytest.raises(TimeoutError, match="no bucket within 0 s"):
        back.receive(0.2, "bucket")
    trainer.abort("weights rank 2 gave up")
    trainer.abort("a later reason")
    with pytest.raises(GroupError, match="weights rank 2 gave up"):
        back.receive(30, "bucket")
    del out, trainer, store
    with pytest.raises(GroupError, match="the trainer at here cannot be reached"):
        back.receive(30, "bucket")


def test_two_senders_listen_at_once_each_on_a_port_of_its_own() -> None:
    stores = [listen("127.0.0.1", 0, 10) for _ in range(3)]
    assert len({store.port for store in stores}) == 3
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", stores[0].port, 10)
