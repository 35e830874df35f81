"""A folder of weights, as its writer and its readers see it, and the worker's half of weights that
come through one.

    folder/slot-0, slot-1   the weights themselves, bucket behind bucket
    folder/manifest.json    names the slot that is complete, with every weight's place and every
                            bucket's digest

A writer, of this run or of any other, only writes the slot that the manifest does not name, once
the last reader has left it, and replaces the manifest last, in one step. So a reader finds a
complete update or the one before it, and never half of either. The writer is
`sharding.remote.storage`.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sharding.wire.channel import SyncError
from sharding.wire.manifest import first_names
from sharding.wire.staging import BUFFERS

MANIFEST = "manifest.json"
SLOTS = ("slot-0", "slot-1")
FORMAT = 1
_POLL_SECONDS = 0.05


def digest(data: memoryview) -> str:
    """Return the digest of a bucket's bytes, by which a reader finds damage on the disk."""
    return hashlib.blake2b(data).hexdigest()


def locked_slot(
    folder: Path, choose: Callable[[], dict[str, Any]], flags: int, timeout: float
) -> tuple[dict[str, Any], int]:
    """Open and lock the slot of a weights folder that `choose` names. If `choose` names another
    slot once the lock is held, start over.

    Returns the result of `choose` and a descriptor of its `slot`, opened with these flags and
    locked for reading or for writing. Raises TimeoutError if other processes hold the lock for
    `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    reads = flags == os.O_RDONLY
    while True:
        chosen = choose()
        path = folder / chosen["slot"]
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            complaint = f"{path} is still being {'written' if reads else 'read'} after {timeout:.0f} s"
            _lock(fd, fcntl.LOCK_SH if reads else fcntl.LOCK_EX, deadline, complaint)
            if choose() == chosen:
                return chosen, fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # a writer has completed another in the meantime


def _lock(fd: int, operation: int, deadline: float, complaint: str) -> None:
    while True:
        try:
            return fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(complaint) from None
            time.sleep(_POLL_SECONDS)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the current manifest of a weights folder. Raises SyncError: there is none, or it is
    not one.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if (folder / "meta.json").exists():
            raise SyncError(
                f"{folder} is TensorDict's, without digests: write it with sharding.StorageWriter"
            ) from None
        raise SyncError(f"{folder} holds no complete weights: {MANIFEST} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SyncError(f"{path} cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or content.get("slot") not in SLOTS
    ):
        raise SyncError(f"{path} is not a manifest of this kind of weights folder (format {FORMAT})")
    return content


class StorageBuckets:
    """Buckets in a file. `threads` buckets are read at a time, from their announcement on, while
    another one is loaded. It implements `receiver.Buckets`.
    """

    ahead = True
    opened = closed = 0

    def __init__(self, worker: Any, threads: int = 1) -> None:
        self._device: torch.device = worker.device
        self._disk = ThreadPoolExecutor(threads, "weights-from-disk")
        self.held = BUFFERS - 1 + threads  # buckets: those that are read, and the one that is loaded
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * self.held
        self._reading: deque[Future[torch.Tensor]] = deque()
        self._expected = 0

    def expect(self, message: dict[str, Any]) -> None:
        """Begin to read a bucket, in a thread, into the next free buffer."""
        at = self._expected % self.held
        self._expected = self._expected + 1
        if self._buffers[at].nbytes < message["nbytes"]:
            self._buffers[at] = torch.empty(message["nbytes"], dtype=torch.uint8)
        self._reading.append(self._disk.submit(_read, message, self._buffers[at][: message["nbytes"]]))

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Wait for the oldest announced bucket, and return its bytes on the worker's device. Raises
        TimeoutError if it was not read in time, and SyncError if it is damaged.
        """
        try:
            read = self._reading[0].result(message["timeout_s"]).to(self._device)
        except TimeoutError:
            raise TimeoutError(
                f"bucket {message['number']} was not read within {message['timeout_s']:.0f} s"
            ) from None
        self._reading.popleft()
        return read

    def close(self, reason: str | None = None) -> None:
        """Release the buffers. `end` closes the file."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * self.held
        self._reading.clear()

    def end(self, fd: int) -> None:
        """Close the file once all reads under way have ended. No bucket can be read after this."""
        waited_for = [*self._reading]

        def close() -> None:
            wait(waited_for)
            os.close(fd)

        if fd >= 0:
            self._disk.submit(close)
        self._disk.shutdown(wait=False)


def _read(message: dict[str, Any], memory: torch.Tensor) -> torch.Tensor:
    bucket = f"bucket {message['number']}"
    data = memory.numpy().data
    done = 0
    with open(message["path"], "rb", buffering=0) as file:
        file.seek(message["offset"])
        while done < len(data):
            if not (count := file.readinto(data[done:])):
                raise SyncError(f"{message['path']} ends inside of {bucket}")
            done += count
    if digest(data) != message["digest"]:
        first = message["pieces"][0][0]
        raise SyncError(f"{bucket} of {message['path']}, with {first}, is not what was written there")
    return memory


class StorageCarrier:
    """An update from a weights folder. It makes up the messages that a trainer would send, from the
    folder's manifest. It implements `receiver.Carrier`.
    """

    def __init__(
        self, folder: str, device: torch.device, timeout: float, verify: bool, threads: int = 1
    ) -> None:
        """Read from `folder`, `threads` buckets at a time. With `verify`, read everything twice:
        the second time weights are compared with the model's, where it keeps them unchanged.
        """
        self._folder = Path(folder)
        self._timeout = timeout
        self._verify = verify
        self._buckets = StorageBuckets(SimpleNamespace(device=device), threads)
        self._fd = -1
        self._manifest: dict[str, Any] = {}
        self._plain = False
        self._messages = self._update()

    def next(self) -> dict[str, Any]:
        """Return the next message of the update. The first call locks the folder's current slot.
        Raises SyncError if there is none.
        """
        return next(self._messages)

    def _update(self) -> Generator[dict[str, Any], None, None]:
        read = partial(read_manifest, self._folder)
        # Keeps writers out
        self._manifest, self._fd = locked_slot(self._folder, read, os.O_RDONLY, self._timeout)
        yield {"kind": "begin", **{key: self._manifest[key] for key in ("weights", "version")}}
        yield from self._announced("bucket")
        yield {"kind": "finish"}
        if self._verify and self._plain:
            yield from self._announced("compare")
        yield {"kind": "end"}

    def _announced(self, kind: str) -> Generator[dict[str, Any], None, None]:
        """Yield each bucket's message, and read ahead the buckets that follow."""
        common = {
            "kind": kind,
            "path": str(self._folder / self._manifest["slot"]),
            "timeout_s": self._timeout,
        }
        messages = [
            {**bucket, **common, "number": at} for at, bucket in enumerate(self._manifest["buckets"])
        ]
        held = self._buckets.held
        for at, message in enumerate(messages):
            # At first as many as there are buffers, then one whenever one has been loaded
            if at == 0:
                following = messages[:held]
            else:
                following = messages[at - 1 + held :][:1]
            for ahead in following:
                self._buckets.expect(ahead)
            yield message

    def answer(self, **fields: Any) -> None:
        """Take the worker's answer. Raises SyncError if the model does not hold the weights that
        were read.
        """
        self._plain = fields.get("plain", self._plain)
        if different := fields.get("different"):
            raise SyncError(f"the model does not hold what was read: {first_names(different)} differ")

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Return the bucket that a message announces, on the worker's device."""
        return self._buckets.bucket(message)

    def leave(self, message: dict[str, Any]) -> None:
        """End the update, and unlock the slot once all reads have ended."""
        self._messages.close()
        self._buckets.end(self._fd)

    def fail(self, error: Exception) -> None:
        """End the update, since there is no sender to tell of the error."""
        self.leave({})
