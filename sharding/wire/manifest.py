"""The weights that an update announces: every weight's checkpoint name, shape and dtype; compared
on both sides.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharding.wire.channel import SyncError

Manifest = dict[str, list[Any]]
"""Checkpoint name -> [shape, dtype as torch names it without its prefix]; plain types, since it
travels.
"""

NamedTensors = list[tuple[str, Tensor]]

Part = tuple[str, int, Tensor]
"""Some of a weight's elements: its name, the number of the first, and the values [n]."""

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and stride, in elements."""

_MOST = 6  # names or differences spelled out in an error


@dataclass(frozen=True)
class Piece:
    """One tensor under its checkpoint name, as a contiguous run of the parameter it is stored in.
    `offset`: bytes from the start of the parameter (in `SourceParameter`) or of the bucket (in
    `Bucket`). `dtype`: mostly the engine's, as torch names it without its prefix ("bfloat16").
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Stretch:
    """Elements [`first`, `first` + `count`) of a weight, at `offset` bytes from the start of the
    bucket.
    """

    name: str
    dtype: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class SourceParameter:
    """One parameter as the trainer holds it. `nbytes`: of the whole parameter in the dtype of its
    pieces, and of the padding its gather leaves behind. `pieces`: the checkpoint tensors inside;
    one, except where Transformers fuses (experts of an MoE layer). `shards`: number of equally
    large parts, one after another, from which it is gathered.
    """

    name: str
    nbytes: int
    pieces: tuple[Piece, ...]
    shards: int = 1


def manifest_of(parameters: list[SourceParameter]) -> Manifest:
    """Return the manifest of the parameters that a source sends. Raises SyncError: two parameters
    hold a weight of the same name.
    """
    manifest: Manifest = {}
    for piece in (piece for parameter in parameters for piece in parameter.pieces):
        if piece.name in manifest:
            raise SyncError(f"the policy has two weights of the name {piece.name}")
        manifest[piece.name] = [list(piece.shape), piece.dtype]
    return manifest


def differences(sent: Manifest, expected: Manifest) -> list[str]:
    """Return a sentence for each weight that is missing, unexpected, or of another shape or
    dtype.
    """
    complaints = [f"{name} is missing" for name in expected if name not in sent]
    complaints += [f"{name} is not expected" for name in sent if name not in expected]
    for name in (name for name in sent if name in expected):
        for what, ours, theirs in zip(("shape", "dtype"), sent[name], expected[name], strict=True):
            if ours != theirs:
                complaints.append(f"{name} has {what} {ours} where {theirs} is expected")
    return complaints


def check_manifest(sent: Manifest, promised: Manifest | None, engine_dtypes: list[str]) -> None:
    """Check an update in a worker, before any weight arrives. `promised`: the weights given to
    `prepare_refit_info`; None where it was not called. `engine_dtypes`: the one that the engine
    computes in, and those that it keeps a few parameters in, such as the biases that decide a
    mixture's routes. Raises SyncError: naming the weights that do not fit. A dtype that the engine
    does not have would be cast by its loaders without a word.
    """
    complaints = [] if promised is None else differences(sent, promised)
    complaints += [
        f"{name} comes as {dtype}, the engine computes in {engine_dtypes[0]}: cast it in the trainer"
        for name, (_, dtype) in sent.items()
        if dtype not in engine_dtypes
    ]
    if complaints:
        more = f"; and {len(complaints) - _MOST} more" if len(complaints) > _MOST else ""
        raise SyncError("the update does not fit: " + "; ".join(complaints[:_MOST]) + more)


def checkpoint_manifest(model: str, dtype: str, tied: bool) -> Manifest:
    """Return the manifest of a checkpoint on disk, read from the headers of its safetensors files,
    in an engine of `dtype`.
    `model`: a folder, or the name of a model in the local hub cache.
    `tied`: the output head is the embedding, and not a weight of its own, whatever the files hold.

    Raises SyncError: there are no safetensors files to read.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = (
        Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    )
    manifest: Manifest = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            manifest |= {name: [file.get_slice(name).get_shape(), dtype] for name in file.keys()}  # noqa: SIM118
    if not manifest:
        raise SyncError(
            f"{folder} holds no safetensors files from which the names of its weights could be read"
        )
    if tied:
        manifest.pop("lm_head.weight", None)
    return manifest


def first_names(names: list[str]) -> str:
    """Return the first few names, for an error."""
    first = ", ".join(names[:_MOST])
    if len(names) <= _MOST:
        return first
    return f"{first} and {len(names) - _MOST} more"
