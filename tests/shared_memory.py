"""Files in /dev/shm that have been left behind, told from those of tests that run at the same time."""

import contextlib
import time
from pathlib import Path

FOLDER = Path("/dev/shm")


def files() -> set[Path]:
    return set(FOLDER.iterdir())


def left_since(before: set[Path]) -> set[Path]:
    """New files that no living process has mapped: those of a neighbour are in use."""
    if not (new := files() - before):
        return new
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            mapped += maps.read_text()
    return {file for file in new if f"{file}\n" not in mapped and file.exists()}


def assert_none_left(since: set[Path]) -> None:
    """Within 20 s from now: what a neighbour has made and not mapped yet, or removes in a moment, is none of ours."""
    deadline = time.monotonic() + 20
    while left := left_since(since):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
