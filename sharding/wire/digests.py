"""Digests: what a rank and its worker compare instead of the weights themselves.

A digest is the sum of multiplier times word, the 4 bytes of a word read as an integer, modulo 2^64; every place has an
odd random multiplier of its own. One wrong element always changes it; two that changed places escape once in 2^32.
Since it is a sum, ranks that hold a part each can digest their parts, with zeros for what others hold. Hashes of bytes
know no parts, and have no kernels for CUDA in torch; `torch.hash_tensor` does not see places; sums of floating-point
numbers depend on their order.

Multipliers of one block are those of the next times a constant, so that block after block is added to the multiple of
one running sum for each place in a block: a single pass over the memory, in torch's own threads. Of what else was
timed, words of 8 bytes are twice as fast, but of an element's sign at their top such a sum does not know the place;
telling halves apart again costs what they gain, as do matrix products of bytes in 8-bit integers or in float64.
"""

import functools
import math
import random
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharding.wire.manifest import View

BLOCK = 1 << 17
"""Elements digested at once, and so how much memory that takes: 20 bytes for each of 4 bytes, less for smaller ones."""

WINDOW = 1 << 14
"""`verify: sample` digests at most so many elements of a view."""

MODULUS = 1 << 64
_WORD = 4  # bytes
_STEP = 0x9E3779B97F4A7C15 - MODULUS  # odd: the multipliers of a block are those of the one behind it times this


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

    Args:
        values: [n], the weight's elements from number `first` on; they are cast to `dtype`.
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
