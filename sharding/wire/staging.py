"""The two staging buffers, and how a worker in another process comes to see the same memory.

On CPU the memory is an anonymous file (`memfd_create`), opened by the worker through `/proc`: it has no name, so
nothing is left behind however a run ends, and a small `/dev/shm` does not matter to it. On CUDA it is plain device
memory, opened through an IPC handle. Either way a buffer is exported once, opened once and closed once; per
bucket only offsets travel.
"""

import mmap
import os
from typing import Any, Protocol

import torch

from sharding.wire import channel as channels
from sharding.wire.channel import SyncError

BUFFERS = 2
"""One is loaded by the worker while the ranks gather into the other."""


STAMP_BYTES = 8


def stamp(buffer: torch.Tensor, number: int) -> None:
    """Write the number of the bucket that is now in the buffer behind its data."""
    buffer[-STAMP_BYTES:].view(torch.int64).fill_(number)


def stamped(buffer: torch.Tensor) -> int:
    """The number of the bucket in the buffer.

    A worker that reads other memory than the trainer wrote finds another one.
    """
    return int(buffer[-STAMP_BYTES:].view(torch.int64).item())


class Staging(Protocol):
    """The trainer's end: `buffers` (uint8), and a `handle` of plain types from which a worker opens the same memory."""

    buffers: list[torch.Tensor]
    handle: dict[str, Any]

    def export(self) -> None:
        """Fill in `handle`; a worker must open it now. What is exported already stays as it is."""

    def flush(self) -> None:
        """Return when everything written to the buffers can be read by the worker."""

    def close(self) -> None:
        """Give the memory back. The worker has closed its end before."""


class SharedMemoryStaging:
    """Staging on CPU: one anonymous memory file, mapped here and in the worker."""

    def __init__(self, nbytes: int) -> None:
        """Allocate.

        Raises:
            SyncError: the system does not give that much.
        """
        self._fd = os.memfd_create("hotbunk-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, BUFFERS * nbytes)
            self.buffers = _map_file(self._fd, nbytes)
        except OSError as error:
            os.close(self._fd)
            raise SyncError(
                f"no {BUFFERS * nbytes} bytes of shared memory for staging ({error.strerror}): lower sync.bucket_mib"
            ) from error
        # The inode tells this memory from an earlier one that had the same descriptor.
        inode = os.fstat(self._fd).st_ino
        self.handle: dict[str, Any] = {
            "kind": "shared_memory", "pid": os.getpid(), "fd": self._fd, "inode": inode, "nbytes": nbytes
        }  # fmt: skip

    def export(self) -> None:
        """Nothing to do: whoever knows the descriptor can open it."""

    def flush(self) -> None:
        """Nothing to wait for: CPU stores are visible to the worker once the message about them arrives."""

    def close(self) -> None:
        """Unmap and close; the pages are freed when the worker's mapping is gone, too."""
        self.buffers = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CudaIpcStaging:
    """Staging on CUDA: device memory from torch's allocator, exported as IPC handles."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.handle: dict[str, Any] = {}

    def export(self) -> None:
        """Make the handles. Not before it is known that the worker will open them.

        torch counts one user of an exported storage until some process has opened and dropped it, and keeps its memory
        until then: what nobody opens is never freed (torch/csrc/CudaIPCTypes.cpp, `CudaIPCSentDataDelete`).
        """
        if not self.handle:
            self.handle = {
                "kind": "cuda_ipc",
                "nbytes": self.buffers[0].nbytes,
                # device, handle, storage bytes, offset, ref counter handle, its offset, event handle, event sync
                "buffers": [list(buffer.untyped_storage()._share_cuda_()) for buffer in self.buffers],
            }

    def flush(self) -> None:
        """Wait for the gathers and casts on this device's current stream."""
        torch.cuda.current_stream(self.buffers[0].device).synchronize()

    def close(self) -> None:
        """Drop the buffers and collect what the worker has released (without `ipc_collect` it would stay)."""
        self.buffers = []
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class LocalStaging:
    """Staging that nobody else maps: what is in it is broadcast, or written to disk."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = _with_stamp(nbytes)
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.handle: dict[str, Any] = {"kind": "local", "nbytes": nbytes}

    def export(self) -> None:
        """Nothing to do: nobody opens it."""

    def flush(self) -> None:
        """Nothing to wait for: whoever reads runs on the same stream."""

    def close(self) -> None:
        """Drop the buffers."""
        self.buffers = []


def _with_stamp(nbytes: int) -> int:
    return -(-nbytes // STAMP_BYTES) * STAMP_BYTES + STAMP_BYTES


def make_staging(nbytes: int, device: torch.device) -> Staging:
    """Two buffers of `nbytes` and a stamp on the policy's device."""
    nbytes = _with_stamp(nbytes)
    return CudaIpcStaging(nbytes, device) if device.type == "cuda" else SharedMemoryStaging(nbytes)


def open_staging(handle: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """The worker's end: uint8 tensors over the trainer's buffers. Dropping the last reference closes them.

    Raises:
        OSError: the trainer's process is gone, or belongs to another user.
    """
    if handle["kind"] == "cuda_ipc":
        return [_open_cuda(list(args), handle["nbytes"], device) for args in handle["buffers"]]
    fd = os.open(f"/proc/{handle['pid']}/fd/{handle['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map_file(fd, handle["nbytes"])
    finally:
        os.close(fd)


def _map_file(fd: int, nbytes: int) -> list[torch.Tensor]:
    memory = torch.frombuffer(mmap.mmap(fd, BUFFERS * nbytes), dtype=torch.uint8)
    return list(memory.split(nbytes))


def _open_cuda(args: list[Any], nbytes: int, device: torch.device) -> torch.Tensor:
    args[0] = device.index  # the sender's index means nothing here: each process numbers its visible devices itself
    # The sender has synchronised (`flush`), and torch never frees the event that it would open to wait for it
    # (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/StorageSharing.cpp, newSharedCuda).
    args[7] = False
    storage = torch.UntypedStorage._new_shared_cuda(*args)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def stamped_bucket(buffer: torch.Tensor, message: dict[str, Any]) -> torch.Tensor:
    """The bucket at the start of a staging buffer, after a look at the stamp behind it.

    Raises:
        SyncError: the memory holds another bucket than was announced.
    """
    marked = buffer[: message["nbytes"] + STAMP_BYTES]
    if (found := stamped(marked)) != message["stamp"]:
        raise channels.SyncError(
            f"the staging buffer holds bucket {found} where bucket {message['stamp']} was announced"
        )
    return marked[:-STAMP_BYTES]
