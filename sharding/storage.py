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
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch

from .channel import SyncError
from .collectives import agree, agreed, rank
from .manifest import manifest_of
from .plan import BucketPlan, Manifest
from .sending import Nobody, Peer, push
from .source import WeightSource
from .transport import BUFFERS, LocalStaging

MANIFEST = "manifest.json"
_SLOTS = ("slot-0", "slot-1")
_FORMAT = 1
_POLL = 0.05  # seconds between two looks at a lock
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


def _lock(fd: int, how: int, deadline: float, complaint: str) -> None:
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(complaint) from None
            time.sleep(_POLL)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The current manifest of a weights folder.

    Raises:
        SyncError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SyncError(f"{folder} holds no complete weights: {MANIFEST} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SyncError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("slot") not in _SLOTS:
        raise SyncError(f"{path} is no manifest of this kind of weights folder (format {_FORMAT})")
    return content


class StorageCarrier:
    """The worker's end: the current slot as a sequence of messages. One bucket is read while another is loaded."""

    def __init__(self, folder: str, device: torch.device, timeout: float, verify: bool) -> None:
        """See `Carrier`; `verify` reads everything a second time, for comparison, where weights can be compared."""
        self._folder, self._device, self._timeout, self._verify = Path(folder), device, timeout, verify
        self._fd = -1
        self._disk = ThreadPoolExecutor(1, "weights-from-disk")
        self._reading: deque[Future[torch.Tensor]] = deque()
        self._manifest: dict[str, Any] = {}
        self._plain = False
        self._messages = self._update()

    def next(self) -> dict[str, Any]:
        """See `Carrier`."""
        return next(self._messages)

    def _update(self) -> Generator[dict[str, Any], None, None]:
        self._lock_current()
        yield {"kind": "begin", **{key: self._manifest[key] for key in ("weights", "version")}}
        yield from self._buckets("bucket")
        yield {"kind": "finish"}
        if self._verify and self._plain:
            yield from self._buckets("compare")
        yield {"kind": "end"}

    def _lock_current(self) -> None:
        """Open the current slot and keep writers out of it; again, if one has moved on in between."""
        deadline = time.monotonic() + self._timeout
        while True:
            self._manifest = read_manifest(self._folder)
            path = self._folder / self._manifest["slot"]
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _lock(fd, fcntl.LOCK_SH, deadline, f"{path} is still being written after {self._timeout:.0f} s")
            except BaseException:
                os.close(fd)
                raise
            if read_manifest(self._folder) == self._manifest:
                self._fd = fd
                return
            os.close(fd)

    def _buckets(self, kind: str) -> Iterator[dict[str, Any]]:
        buckets = self._manifest["buckets"]
        sizes = [bucket["nbytes"] for bucket in buckets]
        buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(BUFFERS)]
        for number, bucket in enumerate(buckets):
            while len(self._reading) < BUFFERS and number + len(self._reading) < len(buckets):
                ahead = number + len(self._reading)
                self._reading.append(self._disk.submit(self._read, ahead, buffers[ahead % BUFFERS]))
            yield {"kind": kind, "number": number, "pieces": bucket["pieces"]}

    def _read(self, number: int, buffer: torch.Tensor) -> torch.Tensor:
        bucket, path = self._manifest["buckets"][number], self._folder / self._manifest["slot"]
        memory = buffer[: bucket["nbytes"]]
        data = memory.numpy().data
        done = 0
        while done < len(data):
            if not (count := os.preadv(self._fd, [data[done:]], bucket["offset"] + done)):
                raise SyncError(f"{path} ends inside of bucket {number}")
            done += count
        if hashlib.blake2b(data).hexdigest() != bucket["digest"]:
            raise SyncError(f"bucket {number} of {path}, with {bucket['pieces'][0][0]}, is not what was written there")
        return memory

    def answer(self, **fields: Any) -> None:
        """See `Carrier`."""
        self._plain = fields.get("plain", self._plain)
        if different := fields.get("different"):
            raise SyncError(f"the model does not hold what was read: {', '.join(different[:6])} differ")

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """See `Carrier`."""
        reading = self._reading.popleft()
        try:
            return reading.result(self._timeout).to(self._device)
        except TimeoutError:
            raise TimeoutError(f"bucket {message['number']} was not read within {self._timeout:.0f} s") from None

    def leave(self, message: dict[str, Any]) -> None:
        """See `Carrier`."""
        self._messages.close()
        if self._fd >= 0:
            self._disk.submit(os.close, self._fd)  # behind what is still being read
        self._disk.shutdown(wait=False)

    def fail(self, error: Exception) -> None:
        """See `Carrier`."""
        self.leave({})
