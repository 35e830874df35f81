"""Patches: the words of a bucket that have changed since it was last sent, with their offsets.

A word has 2 bytes, as an element of bfloat16 does. At a learning rate of 1e-6 a step changes 1 to 3
% of the elements of bfloat16 weights (docs/apart.md), but some in every 64 KiB: blocks would save
nothing, and offsets inside them save nearly all. A patch has the number of changed words in each
block of 65,536 (int32), their offsets in it (16 bits each), and their values: 4 bytes a changed
word.

Places are int64 while they are computed with, 8 bytes a word. So a bucket is gone through in slices
of some blocks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_BITS = 16  # offsets in a block have so many
_OFFSETS = (1 << _BLOCK_BITS) - 1
_ALIGNMENT = 8  # bytes of a stamp, which follows
_SLICE_BLOCKS = 64  # 8 MiB of a bucket, for which temporaries take 100 MiB at most


def patch_between(before: Tensor, after: Tensor) -> Tensor | None:
    """Return the patch from one content of a bucket to another, both uint8 [n], n even; None if it
    would not be smaller.
    """
    words = after.view(torch.int16)
    former = before.view(torch.int16)
    counts = torch.empty(_blocks(words), dtype=torch.int32, device=after.device)
    for blocks, stretch in _slices(words):
        counts[blocks] = _counts(words[stretch] != former[stretch])
    total = int(counts.sum())
    nbytes = counts.nbytes + 4 * total
    if nbytes + _ALIGNMENT > after.nbytes:
        return None
    patch = after.new_zeros(nbytes + -nbytes % _ALIGNMENT)
    patch[: counts.nbytes] = counts.view(torch.uint8)
    offsets, values = _split(patch, counts.nbytes, total)
    first = 0
    for _, stretch in _slices(words):
        changed = (words[stretch] != former[stretch]).nonzero().flatten()
        last = first + len(changed)
        values[first:last] = words[stretch][changed]
        offsets[first:last] = changed.bitwise_and_(_OFFSETS)
        first = last
    return patch


def apply_patch(patch: Tensor, memory: Tensor) -> None:
    """Apply a patch to a bucket's former content, uint8 [n]. A damaged patch writes nothing outside
    of it.
    """
    words = memory.view(torch.int16)
    start = 4 * _blocks(words)
    counts = patch[:start].view(torch.int32)
    total = int(counts.sum())
    if int(counts.min()) < 0 or start + 4 * total > patch.nbytes:
        return  # digests find the missing words
    offsets, values = _split(patch, start, total)
    first = 0
    for blocks, stretch in _slices(words):
        last = first + int(counts[blocks].sum())
        changed = torch.arange(len(counts[blocks]), device=memory.device).repeat_interleave(
            counts[blocks]
        )
        changed <<= _BLOCK_BITS
        changed += offsets[first:last].long().bitwise_and_(_OFFSETS)
        words[stretch][changed.clamp_(max=len(words[stretch]) - 1)] = values[first:last]
        first = last


def _split(patch: Tensor, start: int, total: int) -> tuple[Tensor, Tensor]:
    """Return the offsets and the values of a patch with `total` changed words: views of it, int16
    [total].
    """
    rest = patch[start:].view(torch.int16)
    return rest[:total], rest[total : 2 * total]


def _counts(changed: Tensor) -> Tensor:
    """Return how many of the words, bool [n], are true in each block: int32 [blocks]."""
    end = len(changed) >> _BLOCK_BITS << _BLOCK_BITS  # of the last complete block
    counts = changed[:end].view(-1, 1 << _BLOCK_BITS).sum(1, dtype=torch.int32)
    last = changed[end:].sum(dtype=torch.int32).view(1)
    return counts if end == len(changed) else torch.cat([counts, last])


def _slices(words: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks and the words of each slice."""
    for first in range(0, _blocks(words), _SLICE_BLOCKS):
        last = first + _SLICE_BLOCKS
        yield slice(first, last), slice(first << _BLOCK_BITS, last << _BLOCK_BITS)


def _blocks(words: Tensor) -> int:
    return -(-len(words) >> _BLOCK_BITS)
