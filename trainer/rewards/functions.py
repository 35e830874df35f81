"""The built-in rewards, which a recipe names without an import string. All except reasoning_gym return 1.0 or 0.0.

They are ordinary reward functions: they take the completion first, and by keyword the values that they ask for.
EXTRACTORS has the functions that extract an answer's vote for majority votes.
"""

import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, *, answer: Any) -> float:
    """Returns 1.0 if the completion equals the answer, ignoring white space around either."""
    return float(completion.strip() == _text(answer).strip())


def numeric_match(completion: str, *, answer: Any, tolerance: float = 1e-6) -> float:
    """Returns 1.0 if the last numbers in the completion and in the answer are equal, up to a relative tolerance.

    Numbers may have thousands separators. The answer may be GSM8K's, with text that ends in `#### 72`.
    """
    expected, number = _last_number(_text(answer)), _last_number(completion)
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return float(number is not None and abs(number - expected) <= tolerance * max(1.0, abs(expected)))


def math_verify(completion: str, *, answer: Any) -> float:
    """Returns 1.0 if the math-verify library finds the completion's final expression equal to the answer.

    Expressions may be boxed, LaTeX or plain. The library's own timeouts are off, since they need SIGALRM; the reward
    pool's deadline kills processes that it cannot interrupt.
    """
    from math_verify import parse, verify  # sympy takes a third of a second to import

    text = _text(answer)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not a mathematical expression")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(completion: str, *, row: dict[str, Any]) -> float:
    """Returns the score, 0 to 1, by the reasoning-gym dataset that the row is from (data.path: reasoning_gym:NAME)."""
    from generation.rollouts.environments.reasoning_gym import score

    return score(completion, row)


class FormatRegex:
    """Returns 1.0 if the entire completion matches `pattern`, in which a dot also matches line breaks."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completion: str) -> float:
        return float(self._pattern.fullmatch(completion) is not None)


BUILTINS = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "math_verify": math_verify,
    "format_regex": FormatRegex,
    "reasoning_gym": reasoning_gym,
}


def _expression(completion: str) -> str | None:
    """Returns the completion's final expression as sympy writes it: x + 1 equals 1 + x, but 1/2 differs from 0.5."""
    from math_verify import parse

    expressions = parse(completion, parsing_timeout=None)
    return str(expressions[0]) if expressions else None


def _text(answer: Any) -> str:
    if answer is None:
        raise ValueError("the row has no answer (data.answer_key names its column)")
    return str(answer)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


EXTRACTORS: dict[str, Callable[[str], Any]] = {
    "exact_match": str.strip,
    "numeric_match": _last_number,
    "math_verify": _expression,
}
"""Functions that return the part of a completion that a reward compares with the answer, or None."""
