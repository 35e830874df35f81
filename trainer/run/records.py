"""Reads and writes a run's files, so that they can be read after any kind of end."""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Rows = list[dict[str, Any]]
T = TypeVar("T")
PRIVATE = 0o600
"""The mode of a file that may contain secrets from a recipe."""

_PAUSE_SECONDS = 10.0
_MAY_PASS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.ENOTCONN,
}


def read_rows(path: Path) -> Rows:
    """Read the intact rows of a .jsonl file; none if the file is missing."""
    return [row for _, row in whole_rows(path)]


def whole_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line that is a row with a step, as bytes without the line break and as JSON; skip
    other lines.

    A kill, a full disk or a power cut can end a file at any byte, even within a character, or leave
    null bytes.
    """
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        # Answers may contain other line separators
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            # Invalid JSON or UTF-8, or a number that is too long for Python
            continue
        if isinstance(row, dict) and type(row.get("train/step")) is int:  # a bool is also an int
            yield line, row


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Return the steps that have the metric, and its values there. NaN, null in the file, counts as
    missing.
    """
    pairs = [(row["train/step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def may_pass(error: BaseException) -> bool:
    """Return True for the error of a full disk or a lost network mount, raised on this rank or on
    another one.
    """
    match = re.search(r"\[Errno (\d+)\]", str(error))
    number = getattr(error, "errno", None) or (int(match[1]) if match else None)
    return number in _MAY_PASS or "PytorchStreamWriter failed writing" in str(error)


def patiently(write: Callable[[], T], what: str, seconds: float) -> T:
    """Call `write`, repeat it for about `seconds` while the disk is full or its mount is lost,
    return its result.

    It prints a line each time. Raises the last error of `write`, or at once an error that waiting
    cannot cure. With a collective `write`, whose error is equal on all ranks, all ranks try equally
    often.
    """
    for left in range(int(seconds / _PAUSE_SECONDS), -1, -1):
        try:
            return write()
        except (OSError, RuntimeError) as error:
            if not left or not may_pass(error):
                raise
            wait = f"trying again for {left * _PAUSE_SECONDS:.0f} s"
            print(f"[hotbunk] {what} cannot be written: {error}; {wait}", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_SECONDS)
    raise AssertionError("the last attempt has none left")


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file, text as UTF-8, so that the old or the new content is on disk, never a part of
    it.

    If `mode` is None, an existing private file stays private.
    """
    temporary = path.with_name(path.name + ".tmp")
    if mode is None:
        mode = PRIVATE if path.exists() and path.stat().st_mode & 0o777 == PRIVATE else 0o666
    temporary.unlink(missing_ok=True)  # an existing file would keep its mode
    with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
