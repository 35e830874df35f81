#!/usr/bin/env python3
"""Print the measured rows of docs/benchmarks.csv, or those in which all the words occur.

python scripts/bench/table.py [WORD ...]
"""

import argparse
import csv
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks.csv"
COLUMNS = ("what", "measured", "target", "commit", "command")


def matching(words: list[str]) -> list[dict[str, str]]:
    """Return the rows in which all words occur, in any column and in any case."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [
            row
            for row in csv.DictReader(file)
            if all(w.lower() in " ".join(row.values()).lower() for w in words)
        ]


def main(words: list[str]) -> int:
    """Print the rows as a table; the exit code is 1 if there are none."""
    table, rows = Table(*COLUMNS, show_lines=True), matching(words)
    for row in rows:
        table.add_row(*(row[column] for column in COLUMNS))
    Console().print(
        table if rows else f"no row of {ROWS.name} has all of: {' '.join(words)}", markup=False
    )
    return int(not rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="text of any column, in any case")
    sys.exit(main(parser.parse_args().words))
