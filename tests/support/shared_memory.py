"""Find files in /dev/shm that have been left behind, apart from those of tests that run at the same time."""

import contextlib
import os
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
# Semaphores and memory of processes that pytest starts (see __init__.py). vLLM's spawned engine cores name theirs as a
# run does: with neighbours (`-n 3`) the two cannot be distinguished, so that only `-n 0` and killed_run.py check them.
OF_TESTS = ("sem.pytest-", "pytest_", *(["psm_"] if "PYTEST_XDIST_WORKER" in os.environ else []))


def files() -> set[Path]:
    """Return the files in /dev/shm that are not of pytest's own processes."""
    return {file for file in FOLDER.iterdir() if not file.name.startswith(OF_TESTS)}


def left_since(before: set[Path]) -> set[Path]:
    """New files that no living process has mapped; mapped ones are a neighbour's, and in use.

    Files are compared by inode: glibc's `sem_open` maps a semaphore before it has its name
    (sysdeps/pthread/sem_open.c).
    """
    if not (new := files() - before):
        return new
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            mapped |= {line.split()[4] for line in maps.read_text().splitlines() if str(FOLDER) in line}
    left = set()
    for file in new:
        with contextlib.suppress(FileNotFoundError):
            if str(file.stat().st_ino) not in mapped:
                left.add(file)
    return left


def assert_none_left(since: set[Path]) -> None:
    """Within 20 s, all new files are gone or mapped; a neighbour may need a moment to map or remove its own."""
    deadline = time.monotonic() + 20
    while left := left_since(since):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
