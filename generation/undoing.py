"""Cleanup after a failure."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything, and let the error propagate."""
    try:
        yield
    except BaseException:
        undo()
        raise
