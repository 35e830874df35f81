"""A run's files: each write leaves the old file or the new one, and they can be read after any kind of end."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write all of a file or nothing, and bring it to disk; text as UTF-8."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
