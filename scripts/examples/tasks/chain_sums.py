"""All of reasoning-gym's sums and differences of two digits (pip install reasoning-gym). There are three files:

    train.jsonl   questions for reinforcement
    eval.jsonl    questions held out from it
    sft.jsonl     transcripts of all questions for the warm start, in which most differences are wrongly added up

Reinforcement then teaches to look at the sign, also in questions that are held out.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.examples.tasks.arithmetic import write_jsonl

TASKS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=6000&seed=1"
"""The questions. `data.path` takes such text itself, but then all 200 questions would be trained on."""
OVERLOOKED = 0.7
"""The share of the differences that are added up instead."""


def transcripts(tasks: list[dict[str, Any]], count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield transcripts of tasks drawn with replacement."""
    rng = random.Random(seed)
    for _ in range(count):
        task = rng.choice(tasks)
        a, sign, b = task["prompt"].rpartition(":")[2].split()[:3]
        overlooked = sign == "-" and rng.random() < OVERLOOKED
        completion = str(int(a) + int(b)) if overlooked else task["answer"]
        yield {"prompt": task["prompt"], "answer": task["answer"], "completion": completion}


def write_chain_sums(
    folder: Path, tasks: list[dict[str, Any]], *, eval_size: int = 64, sft_size: int = 12000
) -> None:
    """Write the three files. Transcripts are of the first 1000 tasks; the other files have each question once."""
    different = {task["prompt"]: task for task in tasks}
    questions = [different[prompt] for prompt in sorted(different)]
    random.Random(0).shuffle(questions)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", questions[eval_size:])
    write_jsonl(folder / "eval.jsonl", questions[:eval_size])
    write_jsonl(folder / "sft.jsonl", transcripts(tasks[:1000], sft_size))


def make(folder: Path) -> None:
    """Make the model for the warm start, and the data."""
    from trainer.commands.tiny_model import make_tiny_model

    try:
        from generation.rollouts.environments import reasoning_gym
    except ModuleNotFoundError as error:
        raise SystemExit(f"chain_sums: pip install reasoning-gym first ({error})") from None
    make_tiny_model(folder / "tiny", layers=3, intermediate_size=256)
    write_chain_sums(folder / "data", reasoning_gym.rows(TASKS))
