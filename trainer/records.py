"""A run's files, read back, whatever state the run was left in."""

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The rows of a .jsonl file; none where it is missing. A line that a kill cut off is no row."""
    rows = []
    for line in path.read_text().split("\n") if path.is_file() else ():  # an answer may hold other line separators
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps that have the metric, and its values there; not-a-number is null in the file."""
    pairs = [(row["train/step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
