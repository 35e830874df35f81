"""No copy at all: the trainer computes with the memory that the engine reads, so that an optimizer step is the sync.

Possible where both hold whole weights in one layout: one rank, one worker, weights that vLLM does not re-process. Three
ways were weighed: the engine takes over memory of the trainer's (its CUDA graphs were captured with addresses of its
own), one piece of memory mapped twice through the driver (vLLM's sleeping pool can be mapped anew, but not exported),
and this one: the worker hands out its parameters, and the trainer's become views of them. Where each weight lies, the
record of the first update knows (`sharding.worker.recording`): queries, keys and values, say, one after another in one
parameter.
"""

import itertools
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter, some
from sharding.worker.recording import Recording, storage_key

_REMEDY = "so the trainer cannot compute with it: set sync.zero_copy to false"
_ALIGNMENT = 64  # bytes, as torch's own memory on CPU

Place = tuple[int, int]
"""Number of an exported storage, and the byte in it at which a weight begins."""


class SharedWeights:
    """The worker's end, made once; from then on the memory is the model's for as long as the engine runs.

    Attributes:
        handle: of plain types, from which the trainer opens the same memory.
        places: weight -> where it lies.
    """

    def __init__(self, model: torch.nn.Module, recording: Recording | None, device: torch.device) -> None:
        """Export the parameters, on CPU from memory into which they are moved.

        Raises:
            SyncError: naming the weights that the model does not keep as they are sent, in one piece each.
        """
        runs = contiguous_runs(model, recording)
        storages = {storage_key(run): run.untyped_storage() for run in runs.values()}
        numbers = {key: number for number, key in enumerate(storages)}
        self.places: dict[str, Place] = {
            name: (numbers[storage_key(run)], int(run.storage_offset()) * run.element_size())
            for name, run in runs.items()
        }
        if device.type == "cuda":
            exported = [[storage.nbytes(), list(storage._share_cuda_())] for storage in storages.values()]
            self.handle: dict[str, Any] = {"kind": "cuda_ipc", "storages": exported}
        else:
            assert recording is not None
            self.handle, fresh = _in_a_file(list(storages.values()))
            recording.move(model, dict(zip(storages, fresh, strict=True)))


def contiguous_runs(model: torch.nn.Module, recording: Recording | None) -> dict[str, Tensor]:
    """The view of a parameter that each weight is copied to, where that is all that its loader does.

    Raises:
        SyncError: naming the others.
    """
    if recording is None or not recording.complete:
        raise SyncError(f"{type(model).__name__} re-processes its weights after loading, {_REMEDY}")
    runs = {name: recording.targets(name)[0] for name in recording.weights if recording.is_one_run(name)}
    if apart := [name for name in recording.weights if name not in runs]:
        raise SyncError(f"{type(model).__name__} does not keep {some(apart)} as sent and in one piece, {_REMEDY}")
    return runs


def _in_a_file(storages: list[torch.UntypedStorage]) -> tuple[dict[str, Any], list[torch.UntypedStorage]]:
    """Copies of CPU memory in an anonymous memory file, and the handle from which another process opens them."""
    sizes = [storage.nbytes() for storage in storages]
    *starts, total = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    file = os.memfd_create("hotbunk-weights", os.MFD_CLOEXEC)
    os.ftruncate(file, total)
    handle = {"kind": "shared_memory", "pid": os.getpid(), "fd": file, "starts": starts, "sizes": sizes}
    fresh = _map(file, handle)
    for old, new in zip(storages, fresh, strict=True):
        new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))  # type: ignore[call-overload]
    return handle, [tensor.untyped_storage() for tensor in fresh]


def _map(file: int, handle: dict[str, Any]) -> list[Tensor]:
    """The file's stretches as uint8 tensors, each with a storage of its own."""
    memory = mmap.mmap(file, 0)
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
        for start, size in zip(handle["starts"], handle["sizes"], strict=True)
    ]


def open_shared(
    handle: dict[str, Any], places: dict[str, Place], parameters: list[SourceParameter], device: torch.device
) -> dict[str, Tensor]:
    """The trainer's end: each parameter's memory in the engine, flat, in the engine's dtype.

    Raises:
        SyncError: a parameter consists of weights that the engine keeps in different places.
        OSError: the worker's process is gone, or belongs to another user.
    """
    storages = _open(handle, device)
    return {parameter.name: _memory_of(parameter, places, storages) for parameter in parameters}


def _open(handle: dict[str, Any], device: torch.device) -> list[Tensor]:
    if handle["kind"] == "cuda_ipc":
        return [_open_cuda(list(arguments), nbytes, device) for nbytes, arguments in handle["storages"]]
    file = os.open(f"/proc/{handle['pid']}/fd/{handle['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(file, handle)
    finally:
        os.close(file)


def _open_cuda(arguments: list[Any], nbytes: int, device: torch.device) -> Tensor:
    arguments[0] = device.index  # each process numbers its visible devices itself
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))  # type: ignore[call-overload]


def _memory_of(parameter: SourceParameter, places: dict[str, Place], storages: list[Tensor]) -> Tensor:
    starts = {(places[p.name][0], places[p.name][1] - p.offset) for p in parameter.pieces}
    if len(starts) > 1:
        raise SyncError(f"the engine keeps the parts of {parameter.name} apart, {_REMEDY}")
    number, start = starts.pop()
    return storages[number][start : start + parameter.nbytes].view(getattr(torch, parameter.pieces[0].dtype))
