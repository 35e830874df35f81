"""reasoning-gym (https://github.com/open-thought/reasoning-gym): generated tasks, and their scores.

data: {path: "reasoning_gym:chain_sum?min_terms=2&size=5000&seed=1"}
reward: {functions: [reasoning_gym]}
"""

import json
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import yaml
from reasoning_gym import create_dataset
from reasoning_gym.utils import extract_answer

PREFIX = "reasoning_gym:"


def rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a dataset: `prompt`, `answer`, and the columns that `score` needs.

    The path has the dataset's settings like the query of a URL, with values in YAML. Raises
    ValueError naming the dataset.
    """
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "path": path,
            "entry": json.dumps(entry, default=str),
        }
        for entry in _dataset(path)
    ]


def score(completion: str, row: dict[str, Any]) -> float:
    """Return the library's score, 0 to 1, of the text between <answer> tags, or else of the
    complete completion.
    """
    answer = extract_answer(completion)
    answer = completion.strip() if answer is None else answer
    return float(_dataset(row["path"]).score_answer(answer, json.loads(row["entry"])))


@lru_cache(maxsize=16)
def _dataset(path: str) -> Any:
    name, _, query = path.removeprefix(PREFIX).partition("?")
    settings = {
        key: yaml.safe_load(value) for key, value in parse_qsl(query, strict_parsing=bool(query))
    }
    try:
        return create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym makes no {name!r} with {settings}: {error}") from None
