"""Faster ways to compute the same, each of which a run can do without."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Shortcut(StrEnum):
    """A faster way to compute the same. Values are the names in checkpoints."""

    PREFIXES = "prefixes"  # common beginnings of sequences once (`batch.share_prefixes`)
    HEAD = "head"  # the output head in blocks of the vocabulary, with sums wider than the operands
    SINKS = "sinks"  # attention sinks from the kernel's log-sum-exp
    FLASH3 = "flash3"  # FlashAttention 3 in place of torch's own
    FUSED = "fused"  # norms, rotary embeddings and gates as compiled kernels (`policy.compile`)


_left_out: set[Shortcut] = set()  # of the whole process, as policy, reference and critic compute alike


def in_use(shortcut: Shortcut) -> bool:
    """Return True unless this process leaves the shortcut out."""
    return shortcut not in _left_out


def leave_out(shortcuts: Iterable[Shortcut]) -> None:
    """Make this process leave out these shortcuts, and no others."""
    _left_out.clear()
    _left_out.update(shortcuts)


@contextmanager
def without(shortcut: Shortcut) -> Iterator[None]:
    """Leave out one more shortcut in the block."""
    before = set(_left_out)
    leave_out(before | {shortcut})
    try:
        yield
    finally:
        leave_out(before)
