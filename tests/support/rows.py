"""Files of rows: one JSON document a line, or Parquet."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows in the format that the path's suffix names, and return the path."""
    if path.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([*rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
