"""Weights through a folder: for engines that share a disk with the trainer and nothing else.

    folder/slot-0, slot-1     the weights themselves, bucket behind bucket
    folder/manifest.json      names the slot that is complete, with every weight's place and every bucket's digest

A writer only writes the slot that the manifest does not name, once the last reader has left it, and replaces the
manifest last, in one step. So a reader finds a complete update or the one before it, and never half of either. A weight
is never cut: readers that have recorded nothing need it whole.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch

from sharding.ranks import agree, agreed, rank
from sharding.send.plan import BucketPlan
from sharding.send.push import Nobody, Peer, push
from sharding.send.source import WeightSource
from sharding.wire.folder import _FORMAT, _SLOTS, MANIFEST, _lock, read_manifest
from sharding.wire.manifest import Manifest, manifest_of
from sharding.wire.staging import LocalStaging

_CPU = torch.device("cpu")


class StorageWriter:
    """The trainer's end. Every rank constructs it and calls it alike; rank 0 writes."""

    def __init__(
        self,
        folder: Path | str,
        source: WeightSource,
        device: torch.device = _CPU,
        bucket_bytes: int = 512 << 20,
        timeout: float = 300.0,
    ) -> None:
        """Write to `folder` what `source` gathers on `device`; readers get `timeout` seconds to leave a slot."""
        self._folder, self._source, self._device, self._timeout = Path(folder), source, device, timeout
        self._plan = BucketPlan(source.parameters(), bucket_bytes)
        self._weights = manifest_of(self._plan.parameters())

    def write(self, version: int) -> Path:
        """Write an update. It is the current one when this returns; when it raises, the one before still is.

        Collective over the trainer's ranks.

        Returns:
            The folder, which `load_weights_from_storage` takes.

        Raises:
            RemoteError: on all ranks: the disk is full, or a reader has not left the slot in time.
        """
        slot: _Slot | None = None
        try:
            with agreed("opening the weights folder"):
                staging = LocalStaging(self._plan.capacity, self._device)
                slot = _Slot(self._folder, self._timeout, staging) if rank() == 0 else None
            peer: Peer = slot or Nobody()
            push(self._source, self._plan, staging, peer, "bucket", count(1))
            agree(peer.error, "writing weights")
            with agreed("completing the weights folder"):
                if slot is not None:
                    slot.publish(version, self._weights)
        finally:
            if slot is not None:
                slot.close()
        return self._folder


class _Slot:
    """The slot that is written, as a `Peer`: one bucket goes to disk while the next one is gathered."""

    def __init__(self, folder: Path, timeout: float, staging: LocalStaging) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.error: Exception | None = None
        self._folder, self._staging = folder, staging
        self._name, self._fd = _lock_free_slot(folder, timeout)
        os.ftruncate(self._fd, 0)
        self._end = 0
        self._buckets: list[dict[str, Any]] = []
        self._disk = ThreadPoolExecutor(1, "weights-to-disk")
        self._writing: deque[Future[None]] = deque()

    def post(self, kind: str, **fields: Any) -> None:
        """See `Peer`."""
        memory = self._staging.buffers[fields["buffer"]][: fields["nbytes"]].cpu()
        self._writing.append(self._disk.submit(self._write, memory, fields["pieces"]))

    def collect(self) -> dict[str, Any]:
        """See `Peer`."""
        try:
            self._writing.popleft().result()
        except Exception as error:
            self.error = self.error or error
        return {}

    def _write(self, memory: torch.Tensor, pieces: list[Any]) -> None:
        data = memory.numpy().data
        self._buckets.append(
            {"offset": self._end, "nbytes": len(data), "digest": hashlib.blake2b(data).hexdigest(), "pieces": pieces}
        )
        while data:
            written = os.pwrite(self._fd, data, self._end)
            self._end += written
            data = data[written:]

    def publish(self, version: int, weights: Manifest) -> None:
        """Make what was written the current update."""
        os.fsync(self._fd)
        content = {"format": _FORMAT, "version": version, "slot": self._name, "weights": weights}
        draft = self._folder / f"{MANIFEST}.tmp"
        with draft.open("w") as file:
            json.dump(content | {"buckets": self._buckets}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._folder / MANIFEST)

    def close(self) -> None:
        """Let others have the slot."""
        self._disk.shutdown()
        os.close(self._fd)


def _lock_free_slot(folder: Path, timeout: float) -> tuple[str, int]:
    """Name and descriptor of the slot that the manifest does not name, locked against readers and other writers."""
    deadline = time.monotonic() + timeout
    while True:
        name = _free_slot(folder)
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, fcntl.LOCK_EX, deadline, f"{folder / name} is still being read after {timeout:.0f} s")
            if _free_slot(folder) == name:
                return name, fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another writer has completed it in the meantime


def _free_slot(folder: Path) -> str:
    current = read_manifest(folder)["slot"] if (folder / MANIFEST).exists() else _SLOTS[1]
    return _SLOTS[1 - _SLOTS.index(current)]
