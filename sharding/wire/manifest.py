"""The weights that an update announces: every weight's checkpoint name, shape and dtype; compared on both sides.

A digest is what a rank and its worker compare instead of the weights themselves: the sum of multiplier times word, the
4 bytes of a word read as an integer, modulo 2^64; every place has an odd random multiplier of its own. One wrong
element always changes it; two that changed places escape once in 2^32. Since it is a sum, ranks that hold a part each
can digest their parts, with zeros for what others hold. Hashes of bytes know no parts, and have no kernels for CUDA in
torch; `torch.hash_tensor` does not see places; sums of floating-point numbers depend on their order.

Multipliers of one block are those of the next times a constant, so that block after block is added to the multiple of
one running sum for each place in a block: a single pass over the memory, in torch's own threads. Of what else was
timed, words of 8 bytes are twice as fast, but of an element's sign at their top such a sum does not know the place;
telling halves apart again costs what they gain, as do matrix products of bytes in 8-bit integers or in float64.
"""

import functools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding.wire.channel import SyncError

Manifest = dict[str, list[Any]]
"""Checkpoint name -> [shape, dtype as torch names it without its prefix]; plain types, since it travels."""

NamedTensors = list[tuple[str, Tensor]]

Part = tuple[str, int, Tensor]
"""Some of a weight's elements: its name, the number of the first, and the values [n]."""

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and stride, in elements."""

BLOCK = 1 << 17
"""Elements digested at once, and so how much memory that takes: 20 bytes for each of 4 bytes, less for smaller ones."""

WINDOW = 1 << 14
"""`verify: sample` digests at most so many elements of a view."""

MODULUS = 1 << 64
_WORD = 4  # bytes
_STEP = 0x9E3779B97F4A7C15 - MODULUS  # odd: the multipliers of a block are those of the one behind it times this
_MOST = 6  # names or differences spelled out in an error


@dataclass(frozen=True)
class Piece:
    """One tensor under its checkpoint name, as a contiguous run of the parameter it is stored in.
    `offset`: bytes from the start of the parameter (in `SourceParameter`) or of the bucket (in `Bucket`).
    `dtype`: the engine's dtype, as torch names it without its prefix ("bfloat16").
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
    """Elements [`first`, `first` + `count`) of a weight, at `offset` bytes from the start of the bucket."""

    name: str
    dtype: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class SourceParameter:
    """One parameter as the trainer holds it.
    `nbytes`: of the whole parameter in the engine's dtype, and of the padding its gather leaves behind.
    `pieces`: the checkpoint tensors inside; one, except where Transformers fuses (experts of an MoE layer).
    `shards`: from how many equally large parts, one after another, it is gathered.
    """

    name: str
    nbytes: int
    pieces: tuple[Piece, ...]
    shards: int = 1


def manifest_of(parameters: list[SourceParameter]) -> Manifest:
    """The manifest of what a source sends. Raises SyncError: two parameters hold a weight of the same name."""
    manifest: Manifest = {}
    for piece in (piece for parameter in parameters for piece in parameter.pieces):
        if piece.name in manifest:
            raise SyncError(f"the policy has two weights of the name {piece.name}")
        manifest[piece.name] = [list(piece.shape), piece.dtype]
    return manifest


def differences(sent: Manifest, expected: Manifest) -> list[str]:
    """One sentence for each weight that is missing, unexpected, or of another shape or dtype; [] when they agree."""
    complaints = [f"{name} is missing" for name in expected if name not in sent]
    complaints += [f"{name} is not expected" for name in sent if name not in expected]
    for name in (name for name in sent if name in expected):
        for what, ours, theirs in zip(("shape", "dtype"), sent[name], expected[name], strict=True):
            if ours != theirs:
                complaints.append(f"{name} has {what} {ours} where {theirs} is expected")
    return complaints


def check_manifest(sent: Manifest, promised: Manifest | None, engine_dtype: str) -> None:
    """Check an update in a worker, before any weight arrives.
    `promised`: the weights given to `prepare_refit_info`; None where it was not called.
    Raises SyncError: naming the weights that do not fit. A dtype that is not the engine's would be cast by its loaders
    without a word.
    """
    complaints = [] if promised is None else differences(sent, promised)
    complaints += [
        f"{name} comes as {dtype}, the engine computes in {engine_dtype}: cast it in the trainer"
        for name, (_, dtype) in sent.items()
        if dtype != engine_dtype
    ]
    if complaints:
        more = f"; and {len(complaints) - _MOST} more" if len(complaints) > _MOST else ""
        raise SyncError("the update does not fit: " + "; ".join(complaints[:_MOST]) + more)


def checkpoint_manifest(model: str, dtype: str, tied: bool) -> Manifest:
    """The manifest of a checkpoint on disk, read from the headers of its safetensors files, in an engine of `dtype`.
    `model`: a folder, or the name of a model in the local hub cache.
    `tied`: the output head is the embedding, and not a weight of its own, whatever the files hold.

    Raises SyncError: there are no safetensors files to read.
    """
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    manifest: Manifest = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            manifest |= {name: [file.get_slice(name).get_shape(), dtype] for name in file.keys()}  # noqa: SIM118
    if not manifest:
        raise SyncError(f"{folder} holds no safetensors files from which the names of its weights could be read")
    if tied:
        manifest.pop("lm_head.weight", None)
    return manifest


def first_names(names: list[str]) -> str:
    """The first few names, for an error."""
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def digest(blocks: Iterable[Tensor]) -> int:
    """Of all elements of these tensors in order, each tensor of at most `BLOCK`; in [0, 2^64)."""
    sums: Tensor | None = None
    for block in blocks:
        words = _words(block)
        count = len(words)
        if sums is None:
            sums = torch.zeros_like(words, dtype=torch.int64)
        elif count > len(sums):
            sums = pad(sums, (0, count - len(sums)))
        torch.add(words, sums[:count], alpha=_STEP, out=sums[:count])
        sums[count:].mul_(_STEP)
    return 0 if sums is None else int(sums.mul_(_multipliers(2 * BLOCK, sums.device)[: len(sums)]).sum()) % MODULUS


def _words(block: Tensor) -> Tensor:
    """A block's bytes as int32 [n], zeros behind them up to a whole word; a copy where it does not lie so."""
    flat = block.contiguous().view(-1)
    if flat.nbytes % _WORD or flat.storage_offset() * flat.itemsize % _WORD:
        flat = pad(flat, (0, -flat.nbytes % _WORD // flat.itemsize))  # never the memory itself
    return flat.view(torch.int32)


@functools.lru_cache
def _multipliers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return drawn.bitwise_or_(1).to(device)


def cut(views: Iterable[View], seed: int | None) -> Iterator[Iterator[View]]:
    """For each view the parts that are digested: all of it in blocks, or one window that `seed` decides.
    Nothing but shapes and the seed decide: views of the same shapes are cut alike, whatever their strides.
    """
    draw = random.Random(seed)
    for view in views:
        yield _blocks(view) if seed is None else iter([_window(view, draw)])


def digest_tensors(targets: Iterable[Tensor], seed: int | None) -> int:
    """The digest of what tensors hold, cut as `cut` does it."""
    tensors = list(targets)
    views = [(int(t.storage_offset()), tuple(t.shape), t.stride()) for t in tensors]
    pairs = zip(tensors, cut(views, seed), strict=True)
    return digest(t.as_strided(shape, stride, offset) for t, parts in pairs for offset, shape, stride in parts)


def _blocks(view: View) -> Iterator[View]:
    offset, shape, stride = view
    if math.prod(shape) <= BLOCK:
        yield view
        return
    inner = math.prod(shape[1:])
    rows = BLOCK // inner
    for row in range(0, shape[0], max(rows, 1)):
        start = offset + row * stride[0]
        if rows:
            yield start, (min(rows, shape[0] - row), *shape[1:]), stride
        else:
            yield from _blocks((start, shape[1:], stride[1:]))


def _window(view: View, draw: random.Random) -> View:
    offset, shape, stride = view
    while math.prod(shape) > WINDOW and (inner := math.prod(shape[1:])) > WINDOW:
        offset += draw.randrange(shape[0]) * stride[0]
        shape, stride = shape[1:], stride[1:]
    if math.prod(shape) <= WINDOW:
        return offset, shape, stride
    rows = WINDOW // inner
    return offset + draw.randrange(shape[0] - rows + 1) * stride[0], (rows, *shape[1:]), stride


def part_of(view: View, values: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """A view's elements that this rank owns, and zeros for the rest; zeros do not change a digest.
    Of a view of elements 4 to 11, a rank that owns elements 8 to 15 gives four zeros and its first four.
    `values`: [n], the weight's elements from number `first` on; they are cast to `dtype`.
    """
    offset, shape, stride = view
    start = offset - first
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    begin, end = max(start, 0), min(start + span, values.numel())
    if end - begin == span:
        return values.as_strided(shape, stride, values.storage_offset() + start).to(dtype)
    found = torch.zeros(span, dtype=dtype, device=values.device)
    if begin < end:
        found[begin - start : end - start].copy_(values[begin:end])
    return found.as_strided(shape, stride)
