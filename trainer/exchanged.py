"""What ranks unpickle of each other: the classes that torch.distributed.checkpoint exchanges, and nothing else.

It sends its plans as pickles over gloo (torch 2.13: `_DistWrapper`), whose connections are not authenticated: another
user of the machine who is quick enough could be at the other end. Our own exchanges need no pickle.
"""

import builtins
import pickle
from typing import Any

import torch
from torch.distributed import distributed_c10d

_CLASSES = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # the same in Python 3.13
    "torch": ("Size",),
    "torch.distributed.checkpoint.api": ("CheckpointException",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "LoadItemType",
        "LoadPlan",
        "ReadItem",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
    "torch.serialization": ("_get_layout",),
    "traceback": ("FrameSummary", "StackSummary"),  # with the exception of a rank that failed
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _CLASSES.get(module, ()) or _is_exception(module, name)
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not among the classes that ranks exchange")


def _is_exception(module: str, name: str) -> bool:
    found = getattr(builtins, name, None) if module == "builtins" else None
    return isinstance(found, type) and issubclass(found, BaseException)


def restrict_exchanged_objects() -> None:
    """From now on torch's exchanges of objects between ranks, in this process, raise UnpicklingError for others."""
    distributed_c10d._unpickler = _Unpickler  # type: ignore[misc, assignment]
