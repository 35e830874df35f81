"""Waiting for what happens in other processes and threads."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    happened: Callable[[], Any], seconds: float = 60.0, seen: Callable[[], Any] = str
) -> None:
    """Return when it has happened; fail, with what is seen then, if it takes longer."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.05)
