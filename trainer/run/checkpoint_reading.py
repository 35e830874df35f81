"""The tensors of a checkpoint, read so that nothing in its files is executed, whoever wrote them.

torch.distributed.checkpoint keeps its table of tensors, `.metadata`, as a pickle, which its own reader loads freely, as
it does every entry that the table declares as bytes (torch 2.13: `FileSystemReader.read_metadata`,
`DefaultLoadPlanner.load_bytes`). Here stand-ins take the place of the table's classes and only store their state. That
is checked, and a new table of nothing but tensors is built from it. Tensors themselves torch.distributed reads with
`torch.load(weights_only=True)`.
"""

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, ReadItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.distributed import TABLE_CLASSES, is_size_or_dtype

METADATA = ".metadata"
SHARDS = r"__\d+_\d+\.distcp"  # names of the files that hold tensors


def read_metadata(folder: Path) -> Metadata:
    """The table of a checkpoint's tensors: of each its dtype, its shape, and where its pieces lie.

    Raises ValueError, with a phrase about `.metadata`, for everything that is not such a table.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            table = _Unpickler(file).load().state
        tensors = {str(name): _tensor(name, entry) for name, entry in table["state_dict_metadata"].items()}
        places = dict(_place(index, place) for index, place in table["storage_data"].items())
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                _require(MetadataIndex(name, chunk.offsets) in places, f"does not say where {name} lies")
        return Metadata({**tensors}, storage_data=places)
    except OSError:
        raise
    except _Refused as refused:
        raise ValueError(f"{METADATA} {refused}") from refused
    except Exception as error:  # unpickling damaged bytes may raise nearly anything
        raise ValueError(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from error


def misfit(metadata: Metadata, tensors: Mapping[str, Tensor]) -> str:
    """The first of `tensors` that a checkpoint does not hold in this shape and dtype, as a phrase; "" for none."""
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            return f"it lacks {name}"
        if (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            there = f"{entry.properties.dtype} of size {list(entry.size)}"
            return f"{name} is {there} there and {tensor.dtype} of size {list(tensor.shape)} here"
    return ""


def read_tensors(folder: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place, of sharded ones this rank's part, from a checkpoint that they fit. Not collective."""
    reader, planner = FileSystemReader(folder), _TensorPlanner(False, False)
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _Refused(Exception):
    """Something that no checkpoint of ours has; the message is a phrase that continues the file's name."""


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise _Refused(otherwise)


class _Record:
    """A stand-in: takes what a pickle gives it, and does nothing with it."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows the table's classes by stand-ins of their names, made anew so that no pickle can change them for later."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in TABLE_CLASSES:
            return type(name, (_Record,), {})
        if is_size_or_dtype(module, name):
            return getattr(torch, name)
        raise _Refused(f"names {module}.{name}, which is not part of a table of tensors")


def _tensor(name: Any, entry: Any) -> TensorStorageMetadata:
    _require(type(entry).__name__ == "TensorStorageMetadata", f"declares {name} as something other than a tensor")
    size, dtype = entry.state["size"], entry.state["properties"].state[0]
    chunks = [ChunkStorageMetadata(chunk.state["offsets"], chunk.state["sizes"]) for chunk in entry.state["chunks"]]
    shapes = [size, *(shape for chunk in chunks for shape in (chunk.offsets, chunk.sizes))]
    plain = type(name) is str and type(dtype) is torch.dtype and all(type(shape) is torch.Size for shape in shapes)
    _require(plain, f"has no dtype and shapes for {name}")
    _require(_rows_are_whole(size, chunks), f"has not all rows of {name} once")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _rows_are_whole(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """True if the pieces are consecutive rows from the first to the last, as both backends cut tensors."""
    if not size:
        return [(chunk.offsets, chunk.sizes) for chunk in chunks] == [((), ())]
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.offsets[:1], chunk.sizes[:1])):
        if (chunk.offsets, chunk.sizes) != ((end, *[0] * (len(size) - 1)), (*chunk.sizes[:1], *size[1:])):
            return False
        end += chunk.sizes[0]
    return end == size[0] and all(chunk.sizes[0] >= 0 for chunk in chunks)


def _place(index: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    name, offsets = index.state["fqn"], index.state["offset"]
    file, start, length = (place.state[key] for key in ("relative_path", "offset", "length"))
    plain = type(name) is str and type(offsets) is torch.Size and type(start) is int and type(length) is int
    _require(plain and start >= 0 and length >= 0, f"does not say where {name} lies")
    _require(type(file) is str and re.fullmatch(SHARDS, file), f"looks for {name} in another file")
    _require(not place.state.get("transform_descriptors"), f"has {name} transformed")
    return MetadataIndex(name, offsets), _StorageInfo(file, start, length)


class _TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only; torch's own planner unpickles everything else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")
