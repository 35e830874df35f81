#!/usr/bin/env python3
"""Draw held-out accuracy and reward of several runs side by side.

    .venv/bin/python scripts/compare.py runs/grpo runs/dapo runs/gspo --out picture.png

Runs are named by their folders, finished or not.
"""

import argparse
from pathlib import Path

from trainer.run.plots import compare
from trainer.run.records import read_rows


def main() -> None:
    """Read the runs, and write the picture."""
    parser = argparse.ArgumentParser(description="Draw held-out accuracy and reward of several runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--window", type=int, default=5, help="steps that rewards are averaged over (default: 5)")
    options = parser.parse_args()
    if options.window < 1:
        parser.error("--window must be at least 1")
    runs = {folder.resolve().name: read_rows(folder / "metrics.jsonl") for folder in options.runs}
    if len(runs) < len(options.runs):
        parser.error("two of the runs have the same folder name, so they cannot be distinguished")
    for folder in options.runs:
        if not runs[folder.resolve().name]:
            parser.error(f"{folder} has no metrics.jsonl with a step in it, so there is nothing to draw")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    compare(runs, options.window).savefig(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
