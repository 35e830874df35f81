"""Device memory that is given back for a while; the host's memory keeps its contents."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.policy.optimizer import Updates

TensorSource = Callable[[], Iterable[Tensor]]

_ALIGNMENT = 512  # bytes, as torch's memory on CUDA


class Offload:
    """A set of tensors that can be moved out of the way and back, with all that refers to them as it is.

    Not the tensors are replaced but their storages emptied and filled again, as FSDP does with gathered weights: the
    optimizer's state, sharded parameters and views of flat buffers need not know. The host's memory is allocated
    once, page-locked where the tensors are on CUDA, so that a hundred shifts cost no more of it than one. On a CPU both
    places are the same memory, and nothing is gained.
    """

    def __init__(self, tensors: TensorSource, constant: bool = False) -> None:
        """Nothing moves yet.

        Args:
            tensors: asked anew at every release, which may be views of one another.
            constant: their values never change once released, so that later releases need not copy.
        """
        self._tensors, self._constant = tensors, constant
        self._buffers: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def release(self) -> int:
        """Free the tensors' memory; returns its size in bytes, 0 if it is free already.

        The tensors must not be touched between this and `restore`.
        """
        if self._away:
            return 0
        storages = _storages(self._tensors())
        self._copy_out(storages)
        self._away = list(zip(storages, self._buffers, strict=True))
        for storage in storages:
            storage.resize_(0)
        return sum(buffer.nbytes for buffer in self._buffers)

    def restore(self) -> None:
        """Allocate the memory again and fill it; nothing to do where nothing was released."""
        for storage, buffer in self._away:
            storage.resize_(buffer.nbytes)
            _bytes_of(storage).copy_(buffer, non_blocking=True)
        _wait(storage for storage, _ in self._away)
        self._away = []

    def _copy_out(self, storages: list[torch.UntypedStorage]) -> None:
        sizes = [storage.nbytes() for storage in storages]
        fits = [buffer.nbytes for buffer in self._buffers] == sizes
        if not fits:
            self._buffers = []  # the old memory first
            self._buffers = host_buffers(sizes, any(storage.device.type == "cuda" for storage in storages))
        if not (fits and self._constant):
            for storage, buffer in zip(storages, self._buffers, strict=True):
                buffer.copy_(_bytes_of(storage), non_blocking=True)
        _wait(storages)  # before their memory is freed


def host_buffers(sizes: list[int], page_locked: bool) -> list[Tensor]:
    """uint8 tensors of these sizes in bytes, one after another in a single allocation of the host's memory.

    torch's own page-locked memory is rounded up to a power of two, tensor by tensor, which nearly doubles that of a 7B
    model over eight ranks (`CachingHostAllocatorImpl::allocate` in aten/src/ATen/core/CachingHostAllocator.h). So
    ordinary memory is locked here, and unlocked when the last of the tensors is gone.
    """
    *starts, total = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    arena = torch.empty(total, dtype=torch.uint8)
    if page_locked and total:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(arena.data_ptr(), total, 0))
        weakref.finalize(arena.untyped_storage(), runtime.cudaHostUnregister, arena.data_ptr())
    return [arena[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class ShiftMemory:
    """The memory of a model that moves to the host while the engines are awake, by `policy.offload`."""

    def __init__(self, what: Literal["none", "optimizer", "all"], state: TensorSource, weights: TensorSource) -> None:
        """`state`: the tensors that only an update needs."""
        self._state = Offload(state) if what != "none" else None
        self._weights = Offload(weights) if what == "all" else None

    def release(self, weights: bool) -> int:
        """Move the optimizer's state to the host, and the weights if `weights`; returns the bytes moved."""
        away = [self._state, self._weights if weights else None]
        return sum(offload.release() for offload in away if offload is not None)

    def restore(self) -> None:
        """Everything in its place again."""
        for offload in (self._state, self._weights):
            if offload is not None:
                offload.restore()


class InShifts:
    """A model that learns and takes turns with the engines, whatever shards it; a constructor sets both attributes.

    Attributes:
        updates: the optimizer steps so far.
    """

    updates: Updates
    _memory: ShiftMemory

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self.updates.applied

    def release(self, weights: bool) -> int:
        """Move to the host what `policy.offload` names, and return its bytes; see `ShiftMemory`."""
        return self._memory.release(weights)

    def restore(self) -> None:
        """Everything in its place again."""
        self._memory.restore()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once; of sharded tensors this rank's part."""
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in locals_)
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """Until copies to and from them are done."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
