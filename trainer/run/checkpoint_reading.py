"""Read the tensors of a checkpoint without executing anything in its files, whoever wrote them.

torch.distributed.checkpoint stores its table of tensors, `.metadata`, as a pickle. Its own reader
unpickles that table without restriction, and so each entry that the table declares as bytes (torch
2.13: `FileSystemReader.read_metadata`, `DefaultLoadPlanner.load_bytes`). Here stand-ins replace the
table's classes and only store their state. The state is checked, and a new table that contains only
tensors is built from it. The tensors themselves are read by torch.distributed with
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
    """Read the table of a checkpoint's tensors: their dtypes, shapes, and the places of their
    pieces.

    Raises ValueError, with a phrase about `.metadata`, if the file is not such a table.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            table = _TableUnpickler(file).load().state
        tensors = {
            str(name): _tensor(name, entry) for name, entry in table["state_dict_metadata"].items()
        }
        pieces = dict(_piece(index, piece) for index, piece in table["storage_data"].items())
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                _require(MetadataIndex(name, chunk.offsets) in pieces, f"does not say where {name} lies")
        return Metadata({**tensors}, storage_data=pieces)
    except OSError:
        raise
    except _Refused as refused:
        raise ValueError(f"{METADATA} {refused}") from refused
    except Exception as error:  # unpickling damaged bytes may raise nearly anything
        raise ValueError(f"{METADATA} cannot be read ({type(error).__name__}: {error})") from error


def misfit(metadata: Metadata, tensors: Mapping[str, Tensor]) -> str:
    """Describe the first difference between `tensors` and those of a checkpoint; "" if they are the
    same.

    A tensor may be missing there, have another shape or dtype, or be there alone. Parts of a
    checkpoint, such as a critic, of which `tensors` has nothing at all are not compared.
    """
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            return f"it lacks {name}"
        if (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            there = f"{entry.properties.dtype} of size {list(entry.size)}"
            return f"{name} is {there} there and {tensor.dtype} of size {list(tensor.shape)} here"
    parts = {name.partition(".")[0] for name in tensors}
    for name in metadata.state_dict_metadata:
        if name not in tensors and name.partition(".")[0] in parts:
            return f"it has {name}, which nothing would read here"
    return ""


def read_tensors(folder: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint into tensors of equal shapes, in place; sharded ones get this rank's part.
    Not collective.
    """
    reader = FileSystemReader(folder)
    planner = _TensorPlanner(False, False)
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


class _Refused(Exception):
    """The table contains something that this trainer never writes; the message is a phrase after
    the file's name.
    """


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise _Refused(otherwise)


class _Record:
    """A stand-in for a class in a pickle, which only stores its state."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _TableUnpickler(pickle.Unpickler):
    """Unpickles a table with stand-ins for its classes, new ones each time, so that a pickle cannot
    change them.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in TABLE_CLASSES:
            return type(name, (_Record,), {})
        if is_size_or_dtype(module, name):
            return getattr(torch, name)
        raise _Refused(f"names {module}.{name}, which is not part of a table of tensors")


def _tensor(name: Any, entry: Any) -> TensorStorageMetadata:
    _require(
        type(entry).__name__ == "TensorStorageMetadata",
        f"declares {name} as something other than a tensor",
    )
    size = entry.state["size"]
    dtype = entry.state["properties"].state[0]
    chunks = [
        ChunkStorageMetadata(chunk.state["offsets"], chunk.state["sizes"])
        for chunk in entry.state["chunks"]
    ]
    shapes = [size, *(shape for chunk in chunks for shape in (chunk.offsets, chunk.sizes))]
    plain = (
        type(name) is str
        and type(dtype) is torch.dtype
        and all(type(shape) is torch.Size for shape in shapes)
    )
    _require(plain, f"has no dtype and shapes for {name}")
    _require(_rows_are_whole(size, chunks), f"has not all rows of {name} once")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _rows_are_whole(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Return True if the pieces are consecutive rows that cover the tensor, which is how both
    backends shard it.
    """
    if not size:
        return [(chunk.offsets, chunk.sizes) for chunk in chunks] == [((), ())]
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.offsets[:1], chunk.sizes[:1])):
        offsets = (end, *[0] * (len(size) - 1))
        sizes = (*chunk.sizes[:1], *size[1:])
        if (chunk.offsets, chunk.sizes) != (offsets, sizes):
            return False
        end += chunk.sizes[0]
    return end == size[0] and all(chunk.sizes[0] >= 0 for chunk in chunks)


def _piece(index: Any, piece: Any) -> tuple[MetadataIndex, _StorageInfo]:
    name = index.state["fqn"]
    offsets = index.state["offset"]
    file, start, length = (piece.state[key] for key in ("relative_path", "offset", "length"))
    plain = (
        type(name) is str and type(offsets) is torch.Size and type(start) is int and type(length) is int
    )
    _require(plain and start >= 0 and length >= 0, f"does not say where {name} lies")
    _require(type(file) is str and re.fullmatch(SHARDS, file), f"looks for {name} in another file")
    _require(not piece.state.get("transform_descriptors"), f"has {name} transformed")
    return MetadataIndex(name, offsets), _StorageInfo(file, start, length)


class _TensorPlanner(DefaultLoadPlanner):
    """A load planner that reads tensors only; torch's own planner unpickles everything else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")
