"""Two-digit addition, which a tiny model learns by reinforcement within a minute.

Prompts are zero-padded (`07+85=`). Answers are the three digits of the sum, least significant first (`290`), so that
each digit depends on digits already written. There are three files, whose rows have prompt, answer and, for SFT,
completion:

    train.jsonl   prompts for reinforcement
    eval.jsonl    prompts held out from both trainings, drawn without replacement
    sft.jsonl     transcripts for the warm start. A share of them leaves out all carries, which reinforcement is to
                  teach. A third has only digits below five, which never carry; they are learned early
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Pair = tuple[int, int]


def correct(a: int, b: int) -> str:
    """Return the sum's three digits, units first."""
    return f"{a + b:03d}"[::-1]


def without_carries(a: int, b: int) -> str:
    """Return the sum without any carries; it is right exactly where there are none."""
    return f"{(a % 10 + b % 10) % 10}{(a // 10 + b // 10) % 10}0"


def split_pairs(eval_size: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split all 10,000 pairs into (train, held out), after they are shuffled by the seed."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    if not 0 < eval_size < len(pairs):
        raise ValueError(
            f"eval_size is {eval_size}, but there are only {len(pairs)} pairs, and some must be left for training"
        )
    random.Random(seed).shuffle(pairs)
    return pairs[eval_size:], pairs[:eval_size]


def sft_rows(pairs: list[Pair], count: int, drop_share: float, seed: int) -> Iterator[dict[str, str]]:
    """Yield transcripts of pairs drawn with replacement, each without its carries with probability `drop_share`."""
    rng = random.Random(seed)
    easy = [pair for pair in pairs if max(f"{pair[0]}{pair[1]}") < "5"]
    for index in range(count):
        a, b = rng.choice(pairs if index % 3 else easy)
        digits = without_carries(a, b) if rng.random() < drop_share else correct(a, b)
        yield {**row(a, b), "completion": digits}


def row(a: int, b: int) -> dict[str, str]:
    """Return prompt and right answer of a pair."""
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": correct(a, b)}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(values) + "\n" for values in rows))


def write_arithmetic(
    folder: Path, *, eval_size: int = 256, sft_size: int = 16384, drop_share: float = 0.7, seed: int = 0
) -> None:
    """Write the three files. The same arguments give the same bytes."""
    train, held_out = split_pairs(eval_size, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", (row(a, b) for a, b in train))
    write_jsonl(folder / "eval.jsonl", (row(a, b) for a, b in held_out))
    write_jsonl(folder / "sft.jsonl", sft_rows(train, sft_size, drop_share, seed + 1))


def make(folder: Path) -> None:
    """Make the model for the warm start, and the data."""
    from trainer.commands.tiny_model import make_tiny_model

    make_tiny_model(folder / "tiny")
    write_arithmetic(folder / "data")
