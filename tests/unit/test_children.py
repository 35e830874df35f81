"""A forked child never goes on as a second pytest, whatever happens in it."""

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.children import in_child


def fail() -> None:
    raise KeyboardInterrupt


def hang() -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "code"), [(os.getpid, 0), (fail, 1), (lambda: sys.exit(0), 1), (hang, -signal.SIGALRM)]
)
def test_the_child_ends_by_itself_and_says_how(work: Callable[[], None], code: int) -> None:
    before = os.getpid()
    assert in_child(work, seconds=1 if work is hang else 60) == code
    assert os.getpid() == before
