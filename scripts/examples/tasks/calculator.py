"""Sums and differences of three numbers, for a tiny model with a calculator that takes two numbers at a time.

A prompt such as `(37+42)-15` needs two calls, the second of which uses the result of the first. There are three files:

    train.jsonl   prompts for reinforcement, with their answers
    eval.jsonl    prompts held out from both trainings
    sft.jsonl     transcripts for the warm start, which teach how calls are written and results are read. Most of them
                  show mistakes for reinforcement to correct: a guess without a call, or the first result as the answer
"""

import json
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.examples.tasks.arithmetic import write_jsonl

Question = tuple[int, str, int, str, int]
"""Two operations on three numbers; the first operation is in brackets."""

OPERATORS = {"+": operator.add, "-": operator.sub}


def text(question: Question) -> str:
    """Return the prompt of a question."""
    a, first, b, second, c = question
    return f"({a}{first}{b}){second}{c}"


def steps(question: Question) -> list[tuple[str, int]]:
    """Return the two operations of a question in order, each with its result."""
    a, first, b, second, c = question
    middle = OPERATORS[first](a, b)
    return [(f"{a}{first}{b}", middle), (f"{middle}{second}{c}", OPERATORS[second](middle, c))]


def questions(count: int, rng: random.Random) -> list[Question]:
    """Return different questions of two-digit numbers, without negative results."""
    drawn: dict[Question, None] = {}
    signs = list(OPERATORS)
    while len(drawn) < count:
        a, b, c = (rng.randrange(10, 100) for _ in range(3))
        question = (a, rng.choice(signs), b, rng.choice(signs), c)
        if min(result for _, result in steps(question)) >= 0:
            drawn[question] = None
    return list(drawn)


def call(expression: str) -> str:
    """Return the text of a call of the calculator."""
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}</tool_call>"


def transcript(question: Question, calls: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a conversation with the first `calls` operations; the answer is the last result, or a guess."""
    messages = [{"role": "user", "content": text(question)}]
    answer = rng.randrange(10, 200)
    for expression, answer in steps(question)[:calls]:
        messages.append({"role": "assistant", "content": call(expression)})
        messages.append({"role": "tool", "content": str(answer)})
    return [*messages, {"role": "assistant", "content": str(answer)}]


def sft_rows(
    train: list[Question], count: int, shares: tuple[float, float], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield transcripts of questions drawn with replacement; `shares` are those that guess, and stop after a call."""
    rng = random.Random(seed)
    guess, early = shares
    for calls in rng.choices([0, 1, 2], weights=[guess, early, 1 - guess - early], k=count):
        yield {"messages": transcript(rng.choice(train), calls, rng)}


def row(question: Question) -> dict[str, str]:
    """Return prompt and right answer of a question."""
    return {"prompt": text(question), "answer": str(steps(question)[-1][1])}


def write_calculator(
    folder: Path,
    *,
    train_size: int = 4096,
    eval_size: int = 128,
    sft_size: int = 16384,
    guess_share: float = 0.4,
    early_share: float = 0.3,
    seed: int = 0,
) -> None:
    """Write the three files. The same arguments give the same bytes."""
    different = questions(train_size + eval_size, random.Random(seed))
    train, held_out = different[eval_size:], different[:eval_size]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", map(row, train))
    write_jsonl(folder / "eval.jsonl", map(row, held_out))
    write_jsonl(folder / "sft.jsonl", sft_rows(train, sft_size, (guess_share, early_share), seed + 1))


def make(folder: Path) -> None:
    """Make the model for the warm start, and the data."""
    from trainer.commands.tiny_model import make_tiny_model

    make_tiny_model(folder / "tiny", layers=3, intermediate_size=256)
    write_calculator(folder / "data")
