#!/usr/bin/env python3
"""The warm start of scripts/chain_sums.sh: reasoning-gym's sums of two numbers, most of which overlook a minus.

    python scripts/chain_sums.py FILE [--rows 12000]

Rows have prompt, answer and completion. What is left to learn by reinforcement is to look at the sign.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

TASK = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
OVERLOOKED = 0.7
"""Share of the differences that are added up instead."""


def rows(tasks: list[dict[str, str]], count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Transcripts of tasks drawn with replacement."""
    rng = random.Random(seed)
    for _ in range(count):
        task = rng.choice(tasks)
        a, sign, b = task["prompt"].rpartition(":")[2].split()[:3]
        overlooked = sign == "-" and rng.random() < OVERLOOKED
        completion = str(int(a) + int(b)) if overlooked else task["answer"]
        yield {"prompt": task["prompt"], "answer": task["answer"], "completion": completion}


def main() -> None:
    from generation.rollouts.environments import reasoning_gym

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=12000)
    options = parser.parse_args()
    tasks = reasoning_gym.rows(f"{TASK}&size=1000&seed=1")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text("".join(json.dumps(row) + "\n" for row in rows(tasks, options.rows)))


if __name__ == "__main__":
    main()
