"""TODO."""

import fcntl
import hashlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sharding.wire.channel import SyncError
from sharding.wire.folder import _lock, read_manifest
from sharding.wire.staging import BUFFERS


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
