"""Memory of a process, the trainer's or a worker's: mapped by another on the same device, or given
back to the system.

Memory to map is described by a handle of plain types, and opened from it. On CPU it is an anonymous
file (`memfd_create`), opened by the other process through `/proc`: it has no name, so nothing is
left behind however a run ends, and a small `/dev/shm` does not matter to it. On CUDA it is plain
device memory, opened through an IPC handle. The trainer's two staging buffers are such memory, and
so are the engine's weights where the trainer computes with them. Either is exported once, opened
once and closed once; only offsets travel after.

vLLM's CPU build has no sleep mode (vllm/platforms/interface.py, is_sleep_mode_available), so a
sleeping worker frees its pages here. Addresses stay the same; the pages return as zeros when
touched.
"""

import ctypes
import gc
import itertools
import mmap
import os
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from generation.engine.allocator import plain_segments
from sharding.wire.channel import SyncError

BUFFERS = 2
"""One is loaded by the worker while the ranks gather into the other."""

STAMP_BYTES = 8
_ALIGNMENT = 64  # bytes, as torch's own memory on CPU
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def stamp(buffer: torch.Tensor, number: int) -> None:
    """Write the number of the bucket that is now in the buffer behind its data."""
    buffer[-STAMP_BYTES:].view(torch.int64).fill_(number)


def stamped(buffer: torch.Tensor) -> int:
    """Return the number of the bucket in the buffer; a worker that reads other memory than the
    trainer wrote finds another.
    """
    return int(buffer[-STAMP_BYTES:].view(torch.int64).item())


def stamped_bucket(buffer: torch.Tensor, message: dict[str, Any]) -> torch.Tensor:
    """Return the bucket at the start of a staging buffer, after a look at the stamp behind it.
    Raises SyncError: the memory holds another bucket than was announced.
    """
    marked = buffer[: message["nbytes"] + STAMP_BYTES]
    if (number := stamped(marked)) != message["stamp"]:
        raise SyncError(
            f"the staging buffer holds bucket {number} where bucket {message['stamp']} was announced"
        )
    return marked[:-STAMP_BYTES]


def with_stamp(nbytes: int) -> int:
    """Return the bytes of a buffer for buckets of `nbytes`, aligned for the stamp: 1000 and 1001
    give 1008 and 1016.
    """
    return -(-nbytes // STAMP_BYTES) * STAMP_BYTES + STAMP_BYTES


def local_buffers(buffers: list[torch.Tensor], nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Return two buffers of memory that nobody else maps: the given ones if they have this size, or
    new ones.
    """
    if buffers and buffers[0].nbytes == nbytes:
        return buffers
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class MemoryFile:
    """An anonymous memory file, mapped here.
    `tensors`: uint8, one for each size, each with a storage of its own.
    `handle`: what `open_memory` needs in the other process.
    """

    def __init__(self, name: str, sizes: list[int], purpose: str, remedy: str) -> None:
        """Raise SyncError, with `purpose` and `remedy`, where the system does not give that much
        memory.
        """
        *starts, total = itertools.accumulate(
            (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0
        )
        self._fd = -1
        try:
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
            # Tells this memory from an earlier one that had the same descriptor
            inode = os.fstat(self._fd).st_ino
            layout = {"starts": starts, "sizes": sizes}
            self.handle = {
                "kind": "shared_memory",
                "pid": os.getpid(),
                "fd": self._fd,
                "inode": inode,
                **layout,
            }
            os.ftruncate(self._fd, total)
            self.tensors = _map_file(self._fd, self.handle)
        except OSError as error:
            self.close()
            reason = f"no {sum(sizes)} bytes of shared memory for {purpose} ({error.strerror})"
            raise SyncError(f"{reason}: {remedy}") from error

    def close(self) -> None:
        """Close the file; its pages are freed when no tensor here or elsewhere is left."""
        self.tensors = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _map_file(fd: int, handle: dict[str, Any]) -> list[torch.Tensor]:
    memory = mmap.mmap(fd, 0)
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
        for start, size in zip(handle["starts"], handle["sizes"], strict=True)
    ]


def cuda_handle(storages: list[torch.UntypedStorage]) -> dict[str, Any]:
    """Export device memory; everything written to it must be there before another process is told
    to open it.

    torch counts one user of an exported storage until some process has opened and dropped it, and
    keeps its memory until then: memory that is never opened is never freed (`CudaIPCSentDataDelete`
    in https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/CudaIPCTypes.cpp).
    """
    # _share_cuda_: device, handle, storage bytes, offset, ref counter handle, its offset, event
    # handle, event sync
    return {
        "kind": "cuda_ipc",
        "storages": [[storage.nbytes(), list(storage._share_cuda_())] for storage in storages],
    }


def open_memory(handle: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """Open another process's memory as uint8 tensors. Dropping the last reference closes them.
    Raises OSError: that process is gone, or belongs to another user.
    """
    if handle["kind"] == "cuda_ipc":
        return [_open_cuda(list(arguments), nbytes, device) for nbytes, arguments in handle["storages"]]
    fd = os.open(f"/proc/{handle['pid']}/fd/{handle['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map_file(fd, handle)
    finally:
        os.close(fd)


def _open_cuda(arguments: list[Any], nbytes: int, device: torch.device) -> torch.Tensor:
    arguments[0] = device.index  # each process numbers its visible devices itself
    # The other process has synchronised, and torch never frees the event that it would open to wait
    # for it (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/StorageSharing.cpp,
    # newSharedCuda).
    arguments[7] = False
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))  # type: ignore[call-overload]


def wait_for_writes(device: torch.device) -> None:
    """Wait until another process can read everything written: kernels may still be queued on
    CUDA.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SharedMemoryStaging:
    """Two staging `buffers` on CPU, and the `handle` from which a worker opens them."""

    def __init__(self, nbytes: int) -> None:
        """Raise SyncError where the system does not give that much memory."""
        self._file = MemoryFile(
            "hotbunk-staging", [nbytes] * BUFFERS, "staging", "lower sync.bucket_mib"
        )
        self.buffers = self._file.tensors
        self.handle = self._file.handle

    def export(self) -> None:
        """Do nothing: whoever knows the descriptor can open the memory."""

    def close(self) -> None:
        """Unmap and close; the pages are freed when the worker's mapping is gone, too."""
        self.buffers = []
        self._file.close()


class CudaIpcStaging:
    """Two staging `buffers` on CUDA from torch's allocator, and their `handle` once they are
    exported.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with plain_segments():
            self.buffers = local_buffers([], nbytes, device)
        self.handle: dict[str, Any] = {}

    def export(self) -> None:
        """Make the handle, once; not before it is known that the worker will open it (see
        `cuda_handle`).
        """
        self.handle = self.handle or cuda_handle([buffer.untyped_storage() for buffer in self.buffers])

    def close(self) -> None:
        """Drop the buffers and collect memory that the worker has released (it would stay without
        `ipc_collect`).
        """
        self.buffers = []
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


Staging = SharedMemoryStaging | CudaIpcStaging


def make_staging(nbytes: int, device: torch.device) -> Staging:
    """Return two buffers on the policy's device, each of `nbytes` and a stamp."""
    nbytes = with_stamp(nbytes)
    return CudaIpcStaging(nbytes, device) if device.type == "cuda" else SharedMemoryStaging(nbytes)


def device_id(device: torch.device, rank_in_group: int) -> str:
    """Return the name of a rank's and its worker's device: the UUID on CUDA, `cpu:<rank in the
    engine group>` on CPU.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"cpu:{rank_in_group}"


def release_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Free the whole pages inside each distinct storage; returns the bytes given back. Contents
    become zeros. Only pages that belong to one storage entirely are freed: a small tensor shares
    its page with others.
    """
    freed = 0
    for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values():
        start = -(-storage.data_ptr() // _PAGE) * _PAGE
        length = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE - start
        if length <= 0:
            continue
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
            raise OSError(
                ctypes.get_errno(), f"madvise could not free {length} bytes of a sleeping engine"
            )
        # A hint, which the system may ignore: pages that come back in large pieces come back
        # several times as fast.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
        freed += length
    return freed


def release_weights(model: torch.nn.Module, reprocessed: list[torch.nn.Module]) -> None:
    """Free all weights of a sleeping engine; a complete weight update brings them back.
    `reprocessed`: modules that are loaded layerwise; oneDNN's packed copies, which live in each
    layer's `cpu_linear`, are dropped, and made again then.
    """
    for module in (inner for outer in reprocessed for inner in outer.modules()):
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = None  # type: ignore[assignment]
    release_pages(p.data for p in model.parameters() if p.numel())
    gc.collect()
    return_free_pages()


def return_free_pages() -> None:
    """Give memory that malloc keeps after it was freed back to the system: gigabytes, after a
    training step.
    """
    if hasattr(_libc, "malloc_trim"):  # of glibc alone
        _libc.malloc_trim(0)


def resident_bytes() -> int:
    """Return the bytes of physical memory of this process, without code and other mapped files."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
