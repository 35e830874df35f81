"""Digests that a rank and its worker compare instead of the weights themselves: sums of words, and
a hash of the sums.

A view's bytes are read as words of 8 bytes, integers modulo 2^64. Words fill lines of 128, and
lines pages of 128; summed up are the words of each page, those of each line over all pages, and
those of each column over all lines. So the three sums that contain a word identify its position.
One wrong word changes three sums. Up to three wrong words always change some sum, also two words
that were exchanged. Four can escape only in the corners of a rectangle, where their changes cancel
along each side. The sums of ranks that each hold a part add up to the sums of the whole.

All this is additions, in two passes over memory of which the second finds a block in the cache: 0.9
memcpys on a CPU. Of what else was timed, words of 4 bytes times a multiplier of each place took 2.8
to 3.8 memcpys; words of 8 bytes 1.1, but such a sum forgets the place of an element's sign at their
top; `torch.mv` of integers for each half of a word, 1.9; words of 4 bytes as float64, 1.5 to 2.0.
Hashes of bytes know no parts, and have no kernels for CUDA in torch; `torch.hash_tensor` does not
see places; sums of floating-point numbers depend on their order.
"""

import functools
import hashlib
import math
import os
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding.wire.manifest import View

BLOCK = 1 << 20
"""Elements summed up at once: some MiB, so that calls are few and the cache holds it."""

WINDOW = 1 << 14
"""`verify: sample` digests at most so many elements of a view."""

_LINE = 128  # words
_LINE_BYTES = 8 * _LINE
_FEW = 1 << 16  # bytes


def digest(sums: bytes) -> bytes:
    """Return the digest of a weight, from the sums of all of it."""
    return hashlib.blake2b(sums, digest_size=16).digest()


def add(one: bytes, other: bytes) -> bytes:
    """Add the sums of two parts of a weight."""
    return (numpy.frombuffer(one, numpy.int64) + numpy.frombuffer(other, numpy.int64)).tobytes()


def packed(sums: Tensor) -> bytes:
    """Return sums as bytes to send."""
    return sums.cpu().numpy().tobytes()


@torch.no_grad()
def sum_up(blocks: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sums of all elements of these tensors in order, cast to `dtype`: int64 [128 + 128
    + pages]; of columns, of lines, of pages. Each tensor holds at most `BLOCK`, and begins a
    line. Of one on meta all elements count as 0.
    """
    line_sums: list[Tensor | int] = []
    columns: Tensor | None = None
    for block in blocks:
        if block.is_meta:
            line_sums.append(-(-block.numel() * dtype.itemsize // _LINE_BYTES))
            continue
        for lines in _lines(block, dtype):
            line_sums.append(lines.sum(1))
            columns = lines.sum(0) if columns is None else columns.add_(lines.sum(0))
    if columns is None:  # nothing is here
        columns = torch.zeros(_LINE, dtype=torch.int64)
    line_sums.append(-sum(sums if isinstance(sums, int) else sums.numel() for sums in line_sums) % _LINE)
    every = [columns.new_zeros(sums) if isinstance(sums, int) else sums for sums in line_sums]
    pages = torch.cat(every).view(-1, _LINE)
    return torch.cat([columns, pages.sum(0), pages.sum(1)])


def _lines(block: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a block's bytes as int64 [n, 128]; those after the last whole line follow, padded with
    zeros. A few bytes are copied rather than read twice.
    """
    if block.dtype != dtype or not block.is_contiguous() or block.storage_offset() * dtype.itemsize % 8:
        block = (
            _scratch(BLOCK, dtype, block.device, threading.get_ident())[: block.numel()]
            .view(block.shape)
            .copy_(block)
        )
    raw = block.view(-1).view(torch.uint8)
    nbytes = block.nbytes
    end = nbytes // _LINE_BYTES * _LINE_BYTES if nbytes > _FEW else 0
    if end:
        yield raw[:end].view(torch.int64).view(-1, _LINE)
    if end < nbytes:
        yield pad(raw[end:], (0, -nbytes % _LINE_BYTES)).view(torch.int64).view(-1, _LINE)


@functools.lru_cache
def _scratch(count: int, dtype: torch.dtype, device: torch.device, _thread: int) -> Tensor:
    """Return a thread's memory for blocks that are cast or strided: fresh pages would take longest
    of all.
    """
    return torch.empty(count, dtype=dtype, device=device)


def cut(views: Iterable[View], seed: int | None) -> Iterator[Iterator[View]]:
    """Return the parts of each view that are digested: all of it in blocks, or one window that
    `seed` decides. Nothing but shapes and the seed decide: views of the same shapes are cut alike,
    whatever their strides.
    """
    draw = None if seed is None else random.Random(seed)
    for view in views:
        yield _blocks(view) if draw is None else iter([_window(view, draw)])


def digest_of(tensors: list[Tensor], seed: int | None) -> bytes:
    """Return the digest of the elements of tensors of one dtype, cut as `cut` does it."""
    views = [(int(t.storage_offset()), tuple(t.shape), t.stride()) for t in tensors]
    pairs = zip(tensors, cut(views, seed), strict=True)
    blocks = (
        t.as_strided(shape, stride, offset) for t, parts in pairs for offset, shape, stride in parts
    )
    return digest(packed(sum_up(blocks, tensors[0].dtype if tensors else torch.uint8)))


def digests_of(weights: dict[str, list[Tensor]], seed: int | None) -> dict[str, bytes]:
    """Return the digest of each weight, over all of its tensors. On a CPU two threads share the
    weights between them: the rank waits meanwhile, so its cores are idle.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensors in weights.values() for tensor in tensors)
    mapper = _threads().map if on_cpu and seed is None else map
    return dict(
        zip(weights, mapper(lambda tensors: digest_of(tensors, seed), weights.values()), strict=True)
    )


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "digests", torch.set_num_threads, (torch.get_num_threads(),))


# A fork has the pool without its threads, and would wait
os.register_at_fork(after_in_child=_threads.cache_clear)


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
        shape = shape[1:]
        stride = stride[1:]
    if math.prod(shape) <= WINDOW:
        return offset, shape, stride
    rows = WINDOW // inner
    return offset + draw.randrange(shape[0] - rows + 1) * stride[0], (rows, *shape[1:]), stride


def part_of(view: View, values: Tensor, first: int) -> Tensor:
    """Return a view's elements that this rank owns, and zeros for the rest; on meta where it owns
    none. Of a view of elements 4 to 11, a rank that owns elements 8 to 15 gives four zeros and its
    first four. `values`: [n], the weight's elements from number `first` on.
    """
    offset, shape, stride = view
    start = offset - first
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    begin = max(start, 0)
    end = min(start + span, values.numel())
    if end - begin == span:
        return values.as_strided(shape, stride, values.storage_offset() + start)
    if begin >= end:
        return torch.empty(shape, device="meta")
    padded = torch.zeros(span, dtype=values.dtype, device=values.device)
    padded[begin - start : end - start].copy_(values[begin:end])
    return padded.as_strided(shape, stride)
