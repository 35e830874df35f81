"""Temporary release of device memory, whose contents wait in host memory."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from sharding.send.source import local_part
from sharding.wire.staging import bytes_of
from trainer.policy.optimizer import Updates

TensorSource = Callable[[], Iterable[Tensor]]

_ALIGNMENT = 512  # bytes, the alignment of torch's memory on CUDA


class Offload:
    """A set of tensors that can be moved to host memory and back, while all references to them stay
    valid.

    The tensors are not replaced. Their storages are emptied and filled again, as FSDP does with
    gathered weights, so the optimizer's state, sharded parameters and views of flat buffers remain
    valid. Host memory is allocated once, page-locked if the tensors are on CUDA, so a hundred
    shifts need no more of it than one. On a CPU both places are the same memory, and nothing is
    gained.
    """

    def __init__(self, tensors: TensorSource, constant: bool = False) -> None:
        """Take a function for the tensors, which every release calls; they may be views of one
        another.

        With `constant`, the values never change after the first release, so later releases do not
        copy.
        """
        self._tensors = tensors
        self._constant = constant
        self._buffers: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def release(self) -> int:
        """Free the tensors' memory; return its size in bytes, 0 if it is free already.

        The tensors must not be used until `restore`.
        """
        if self._away:
            return 0
        every = (local_part(tensor).untyped_storage() for tensor in self._tensors())
        # Each once
        storages = list({storage.data_ptr(): storage for storage in every if storage.nbytes()}.values())
        sizes = [storage.nbytes() for storage in storages]
        fits = [buffer.nbytes for buffer in self._buffers] == sizes
        if not fits:
            self._buffers = []  # frees the old memory before new memory is allocated
            self._buffers = host_buffers(
                sizes, any(storage.device.type == "cuda" for storage in storages)
            )
        pairs = list(zip(storages, self._buffers, strict=True))
        if not (fits and self._constant):
            for storage, buffer in pairs:
                buffer.copy_(bytes_of(storage), non_blocking=True)
        _wait(storages)  # copies must end before the memory is freed
        for storage in storages:
            storage.resize_(0)
        self._away = pairs
        return sum(buffer.nbytes for buffer in self._buffers)

    def restore(self) -> None:
        """Allocate the memory again and fill it; do nothing if nothing was released."""
        for storage, buffer in self._away:
            storage.resize_(buffer.nbytes)
            bytes_of(storage).copy_(buffer, non_blocking=True)
        _wait(storage for storage, _ in self._away)
        self._away = []


def host_buffers(sizes: list[int], page_locked: bool) -> list[Tensor]:
    """Return uint8 tensors of these sizes in bytes, one after another in a single allocation of
    host memory.

    torch rounds page-locked memory up to a power of two, tensor by tensor, which nearly doubles it
    for a 7B model over eight ranks (`CachingHostAllocatorImpl::allocate` in
    aten/src/ATen/core/CachingHostAllocator.h). This function therefore locks ordinary memory, which
    is unlocked when the last of the tensors is gone.
    """
    *starts, total = itertools.accumulate(
        (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0
    )
    arena = torch.empty(total, dtype=torch.uint8)
    if page_locked and total:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(arena.data_ptr(), total, 0))
        weakref.finalize(arena.untyped_storage(), runtime.cudaHostUnregister, arena.data_ptr())
    return [arena[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Offloadable:
    """A trained model that can put memory away while the engines are awake, whatever shards it."""

    updates: Updates  # the optimizer steps so far; the subclass sets it

    def __init__(
        self, offload: Literal["none", "optimizer", "all"], state: TensorSource, weights: TensorSource
    ) -> None:
        """Take `policy.offload`, and functions for the tensors that only an update needs and for
        the weights.
        """
        self._state = Offload(list if offload == "none" else state)
        self._compute = Offload(weights if offload == "all" else list)

    @property
    def version(self) -> int:
        """The number of updates applied."""
        return self.updates.applied

    def release(self, weights: bool) -> int:
        """Put the optimizer's state away, and the weights if `weights`; return the bytes that were
        not away yet.
        """
        return self._state.release() + (self._compute.release() if weights else 0)

    def restore(self) -> None:
        """Bring everything back."""
        self._state.restore()
        self._compute.restore()


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait until copies from and to the storages are done."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
