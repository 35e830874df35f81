"""Patches: the words of a bucket that have changed since it was last sent, with their places.

A word has 2 bytes, as an element of bfloat16 does. At a learning rate of 1e-6 a step changes 1 to 3 % of the elements
of bfloat16 weights (docs/apart.md), but some in every 64 KiB: blocks would save nothing, and places inside them save
nearly all. A patch has the number of changed words in each block of 65,536 (int32), their places in it (16 bits each),
and their values: 4 bytes a changed word.
"""

import torch
from torch import Tensor

_BLOCK_BITS = 16  # places in a block have so many
_ALIGNMENT = 8  # bytes of a stamp, which follows


def patch_between(before: Tensor, after: Tensor) -> Tensor | None:
    """The patch from one content of a bucket to another, both uint8 [n], n even; None if it would not be smaller."""
    words = after.view(torch.int16)
    changed = (words != before.view(torch.int16)).nonzero().flatten()
    blocks = _blocks(words)
    nbytes = 4 * blocks + 4 * len(changed)
    if nbytes + _ALIGNMENT > after.nbytes:
        return None
    counts = torch.bincount(changed >> _BLOCK_BITS, minlength=blocks).to(torch.int32)
    parts = [counts, (changed & ((1 << _BLOCK_BITS) - 1)).to(torch.int16), words[changed]]
    return torch.cat([*(part.view(torch.uint8) for part in parts), after.new_zeros(-nbytes % _ALIGNMENT)])


def apply_patch(patch: Tensor, memory: Tensor) -> None:
    """Changes a bucket's former content, uint8 [n], by a patch. Whatever a damaged patch says stays in the bucket."""
    words = memory.view(torch.int16)
    start = 4 * _blocks(words)
    counts, rest = patch[:start].view(torch.int32).long(), patch[start:].view(torch.int16)
    total = int(counts.sum())
    if int(counts.min()) < 0 or 2 * total > len(rest):
        return  # digests find what is missing
    blocks = torch.arange(len(counts), device=memory.device).repeat_interleave(counts)
    places = (blocks << _BLOCK_BITS) + (rest[:total].long() & ((1 << _BLOCK_BITS) - 1))
    words[places.clamp_(max=len(words) - 1)] = rest[total : 2 * total]


def _blocks(words: Tensor) -> int:
    return -(-len(words) >> _BLOCK_BITS)
