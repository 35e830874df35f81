"""No copy at all: the worker hands out its parameters for the trainer to compute in, so that an optimizer step is the
sync. The trainer's half is `sharding.send.ways.ZeroCopy`.

Possible where both hold whole weights in one layout: one rank, one worker, weights that vLLM does not re-process. The
record of the first update knows where each weight lies (`sharding.worker.recording`): queries, keys and values, say,
one after another in one parameter.
"""

import torch
from torch import Tensor

from sharding.wire.channel import SyncError
from sharding.wire.manifest import first_names
from sharding.wire.staging import MemoryFile, cuda_handle
from sharding.worker.recording import Recording, storage_key

_REMEDY = "so the trainer cannot compute with it: set sync.way to staged"


class SharedWeights:
    """Made once; from then on the memory is the model's for as long as the engine runs.

    Attributes:
        handle: from which the trainer opens the same memory (`open_memory`).
        places: weight -> number of the storage it lies in, and the byte at which it begins there.
    """

    def __init__(self, model: torch.nn.Module, recording: Recording | None, device: torch.device) -> None:
        """Export the parameters, on CPU from memory into which they are moved.

        Raises:
            SyncError: naming the weights that the model does not keep as they are sent, in one piece each.
        """
        runs = contiguous_runs(model, recording)
        storages = {storage_key(run): run.untyped_storage() for run in runs.values()}
        numbers = {key: number for number, key in enumerate(storages)}
        self.places: dict[str, tuple[int, int]] = {
            name: (numbers[storage_key(run)], int(run.storage_offset()) * run.element_size())
            for name, run in runs.items()
        }
        if device.type == "cuda":
            self.handle = cuda_handle(list(storages.values()))
            return
        self._file = MemoryFile("hotbunk-weights", [storage.nbytes() for storage in storages.values()])
        self.handle = self._file.handle
        for old, new in zip(storages.values(), self._file.tensors, strict=True):
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))  # type: ignore[call-overload]
        assert recording is not None
        recording.move(model, {key: t.untyped_storage() for key, t in zip(storages, self._file.tensors, strict=True)})


def contiguous_runs(model: torch.nn.Module, recording: Recording | None) -> dict[str, Tensor]:
    """The view of a parameter that each weight is copied to, where that is all that its loader does.

    Raises:
        SyncError: naming the others.
    """
    if recording is None or not recording.complete:
        raise SyncError(f"{type(model).__name__} re-processes its weights after loading, {_REMEDY}")
    runs = {name: recording.targets(name)[0] for name in recording.weights if recording.is_one_run(name)}
    if apart := first_names([name for name in recording.weights if name not in runs]):
        raise SyncError(f"{type(model).__name__} does not keep {apart} as sent and in one piece, {_REMEDY}")
    return runs
