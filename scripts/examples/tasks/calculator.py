"""Sums and differences of three numbers for a tiny model with a calculator that takes two numbers at a time.

A prompt such as `(37+42)-15` needs two calls, the second of which uses what the first gave. Three files:

    train.jsonl   prompts for reinforcement, with their answers
    eval.jsonl    prompts held out from both trainings
    sft.jsonl     transcripts for the warm start: how calls are written and results are read. Most show bad habits,
                  which are left to unlearn: guessing without a call, or taking the first result for the last
"""

import json
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.examples.tasks.arithmetic import write_jsonl

Question = tuple[int, str, int, str, int]
"""Two operations on three numbers, the first of them in brackets."""

OPERATORS = {"+": operator.add, "-": operator.sub}


def text(question: Question) -> str:
    """The prompt."""
    a, first, b, second, c = question
    return f"({a}{first}{b}){second}{c}"


def steps(question: Question) -> list[tuple[str, int]]:
    """The calculations, one operation after the other, each with its result."""
    a, first, b, second, c = question
    middle = OPERATORS[first](a, b)
    return [(f"{a}{first}{b}", middle), (f"{middle}{second}{c}", OPERATORS[second](middle, c))]


def questions(count: int, rng: random.Random) -> list[Question]:
    """Different questions of two-digit numbers, without negative results."""
    found: dict[Question, None] = {}
    signs = list(OPERATORS)
    while len(found) < count:
        a, b, c = (rng.randrange(10, 100) for _ in range(3))
        question = (a, rng.choice(signs), b, rng.choice(signs), c)
        if min(result for _, result in steps(question)) >= 0:
            found[question] = None
    return list(found)


def call(expression: str) -> str:
    """The text with which the policy asks for a calculation."""
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}</tool_call>"


def transcript(question: Question, calls: int, rng: random.Random) -> list[dict[str, str]]:
    """A conversation with the first `calls` calculations; the answer is the last result, or a guess."""
    messages = [{"role": "user", "content": text(question)}]
    answer = rng.randrange(10, 200)
    for expression, answer in steps(question)[:calls]:
        messages.append({"role": "assistant", "content": call(expression)})
        messages.append({"role": "tool", "content": str(answer)})
    return [*messages, {"role": "assistant", "content": str(answer)}]


def sft_rows(known: list[Question], count: int, shares: tuple[float, float], seed: int) -> Iterator[dict[str, Any]]:
    """Transcripts of questions drawn with replacement; `shares` of them guess, and stop after one call."""
    rng = random.Random(seed)
    guess, early = shares
    for calls in rng.choices([0, 1, 2], weights=[guess, early, 1 - guess - early], k=count):
        yield {"messages": transcript(rng.choice(known), calls, rng)}


def row(question: Question) -> dict[str, str]:
    """Prompt and right answer."""
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
    """Write the three files; the same arguments give the same bytes."""
    known = questions(train_size + eval_size, random.Random(seed))
    train, held_out = known[eval_size:], known[:eval_size]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", map(row, train))
    write_jsonl(folder / "eval.jsonl", map(row, held_out))
    write_jsonl(folder / "sft.jsonl", sft_rows(train, sft_size, (guess_share, early_share), seed + 1))


def make(folder: Path) -> None:
    """The model to warm-start, and the data."""
    from trainer.commands.tiny_model import make_tiny_model

    make_tiny_model(folder / "tiny", layers=3, intermediate_size=256)
    write_calculator(folder / "data")
