"""The base model and the problems of docs/results.md: three kinds of reasoning-gym, answered by worked solutions.

`make` writes a random model with a tokenizer of its own, and three files whose rows have prompt and answer:

    train.jsonl   problems for reinforcement
    eval.jsonl    problems held out from both trainings
    sft.jsonl     worked solutions of the training problems for the warm start, with mistakes that reinforcement is to
                  mend: a sum overlooks a minus, an equation keeps a sign, a divisor comes too early
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from scripts.examples.tasks.arithmetic import write_jsonl
from trainer.commands import tiny_model

KINDS = {
    "chain_sum": "min_terms=2&max_terms=6&min_digits=1&max_digits=1",
    "simple_equations": "min_terms=2&max_terms=3&max_value=12&operators=[%2B,-]&operators_weights=[0.5,0.5]",
    "gcd": "min_numbers=2&max_numbers=2&min_value=2&max_value=40",
}
"""The kinds of problems, with the settings of reasoning-gym."""
READ = (
    "letter_counting",
    "word_sorting",
    "number_sorting",
    "spell_backward",
    "basic_arithmetic",
    "countdown",
)
"""Further kinds whose texts the tokenizer is made from, so that its vocabulary is not of three sentences."""
TRAIN, HELD_OUT, TRANSCRIPTS = 12000, 256, 40000
MISTAKEN = 0.65
"""The share of the solutions that make the mistake wherever it can be made; the others never make it."""
VOCABULARY = 2048
SIZE = {"hidden_size": 256, "intermediate_size": 640, "layers": 4, "heads": 8, "kv_heads": 2}


def chain_sum(expression: str, careless: bool) -> Iterator[str]:
    """Yield the lines of a sum from left to right, and its value; a careless one adds what it should subtract."""
    first, *rest = expression.split()
    value = int(first)
    for sign, term in zip(rest[::2], map(int, rest[1::2]), strict=True):
        result = value + term if sign == "+" or careless else value - term
        yield f"{value} {sign} {term} = {result}"
        value = result
    yield str(value)


def simple_equations(equation: str, careless: bool) -> Iterator[str]:
    """Yield the lines that solve `x + 5 = 12`, `x - 5 = 7` or `5 - x = 7`; a careless one does not turn the sign."""
    first, sign, second, _, right = equation.split()
    yield equation
    if first.isalpha():
        unknown, terms, turned = first, (int(right), int(second)), "-" if sign == "+" else "+"
    else:
        unknown, terms, turned = second, (int(first), int(right)), "-"
    used = {"+": "-", "-": "+"}[turned] if careless else turned
    value = terms[0] + terms[1] if used == "+" else terms[0] - terms[1]
    yield f"{unknown} = {terms[0]} {used} {terms[1]}"
    yield f"{unknown} = {value}"
    yield str(value)


def gcd(first: int, second: int, careless: bool) -> Iterator[str]:
    """Yield the lines of Euclid's algorithm; a careless one takes a remainder for the divisor at once."""
    large, small = max(first, second), min(first, second)
    while small:
        yield f"{large} = {large // small} * {small} + {large % small}"
        large, small = small, large % small
        if small and careless:
            large = small
            break
    yield str(large)


def solution(problem: dict[str, Any], careless: bool) -> str:
    """Return a worked solution of a row of reasoning-gym, with its mistakes if it is `careless`."""
    given = json.loads(problem["entry"])["metadata"]
    lines = {
        "chain_sum": lambda: chain_sum(given["expression"], careless),
        "simple_equations": lambda: simple_equations(given["equation"], careless),
        "gcd": lambda: gcd(*given["numbers"], careless),
    }
    *worked, answer = lines[given["source_dataset"]]()
    return "\n".join([*worked, f"<answer>{answer}</answer>"])


def is_wanted(problem: dict[str, Any]) -> bool:
    """Return whether a problem is not an equation of another form than the three that `simple_equations` solves."""
    equation = json.loads(problem["entry"])["metadata"].get("equation", "x - 1 = 0")
    return re.fullmatch(r"([a-z] [+-] \d+|\d+ - [a-z]) = -?\d+", equation) is not None


def problems(count: int) -> list[dict[str, Any]]:
    """Return at most `count` different problems of all kinds, shuffled; the same at every call.

    A line break ends each prompt, which takes the place of a chat's marks.
    """
    from generation.rollouts.environments import reasoning_gym

    share = -(-count // len(KINDS))
    mixed: list[dict[str, Any]] = []
    for kind, settings in KINDS.items():
        rows = reasoning_gym.rows(f"reasoning_gym:{kind}?{settings}&size={3 * share}&seed=1")
        different = {row["prompt"]: row for row in rows if is_wanted(row)}
        mixed += list(different.values())[:share]
    random.Random(0).shuffle(mixed)
    return [row | {"prompt": row["prompt"] + "\n"} for row in mixed[:count]]


def other_problems() -> list[dict[str, Any]]:
    """Return problems of the kinds in `READ`."""
    from generation.rollouts.environments import reasoning_gym

    return [row for kind in READ for row in reasoning_gym.rows(f"reasoning_gym:{kind}?size=500&seed=1")]


def transcripts(rows: list[dict[str, Any]], count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield worked solutions of problems drawn with replacement, with mistakes in a share of `MISTAKEN`."""
    rng = random.Random(seed)
    for _ in range(count):
        row = rng.choice(rows)
        careless = rng.random() < MISTAKEN
        completion = solution(row, careless)
        yield {"prompt": row["prompt"], "answer": row["answer"], "completion": completion}


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer from texts; like Qwen's, it has a token for each digit. Answer end with <|im_end|>."""
    untrained = Qwen2Tokenizer(eos_token=tiny_model.EOS)
    tokenizer = untrained.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    tokenizer.chat_template = tiny_model.CHAT_TEMPLATE
    return tokenizer


def make(folder: Path) -> None:
    """Make the random model for the warm start, with its tokenizer, and the data."""
    rows = problems(TRAIN + HELD_OUT)
    train, held_out = rows[HELD_OUT:], rows[:HELD_OUT]
    sft = list(transcripts(train, TRANSCRIPTS))
    texts = [row["prompt"] for row in other_problems()] + [
        row["prompt"] + row["completion"] for row in sft
    ]
    tiny_model.make_tiny_model(
        folder / "tiny",
        architecture="qwen3",
        tokenizer=make_tokenizer(texts),
        vocab_size=VOCABULARY,
        **SIZE,
    )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "data" / "train.jsonl", train)
    write_jsonl(folder / "data" / "eval.jsonl", held_out)
    write_jsonl(folder / "data" / "sft.jsonl", sft)
