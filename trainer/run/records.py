"""A run's files: each write leaves the old file or the new one, and they can be read after any kind of end."""

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
"""The mode of a file in which secrets that stand in a recipe may be."""

_PAUSE_SECONDS = 10.0
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN}


def read_rows(path: Path) -> Rows:
    """The whole rows of a .jsonl file; none where it is missing."""
    return [row for _, row in whole_rows(path)]


def whole_rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that is a row with a step, as bytes without its end and as JSON; every other line is left out.

    A kill, a full disk or a power cut ends a file at any byte, in the middle of a character too, or leaves null bytes.
    """
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():  # an answer may hold other line separators
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):  # of JSON, of UTF-8, and of numbers with more digits than Python takes
            continue
        if isinstance(row, dict) and type(row.get("train/step")) is int:  # a bool is an int, too
            yield line, row


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps that have the metric, and its values there; not-a-number is null in the file."""
    pairs = [(row["train/step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def may_pass(error: BaseException) -> bool:
    """True for what a full disk or a lost network mount says, in an exception of this rank's or told by another."""
    found = re.search(r"\[Errno (\d+)\]", str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else None)
    return number in _MAY_PASS or "PytorchStreamWriter failed writing" in str(error)


def patiently(write: Callable[[], T], what: str, seconds: float) -> T:
    """The result of `write`, tried again for about so many seconds while the disk is full or its mount is lost.

    It says so each time. Raises what `write` does at last, or at once where waiting is of no use. With a collective
    `write`, whose error is the same on all ranks, all of them try equally often.
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
    """Write all of a file or nothing, and bring it to disk; text as UTF-8. Without a `mode`, a private one stays so."""
    temporary = path.with_name(path.name + ".tmp")
    if mode is None:
        mode = PRIVATE if path.exists() and path.stat().st_mode & 0o777 == PRIVATE else 0o666
    temporary.unlink(missing_ok=True)  # it has a mode of its own
    with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
