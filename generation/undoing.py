"""What is undone where something did not end well."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` where the block raises, whatever it is, which is then raised on."""
    try:
        yield
    except BaseException:
        undo()
        raise
