"""Rewards a recipe can name without an import string. All but reasoning_gym give 1.0 or 0.0.

They are ordinary reward functions: the completion first, then by keyword the values they ask for. EXTRACTORS has the
votes of majority votes.
"""

import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, *, answer: Any) -> float:
    """The completion is the answer, except for white space around either."""
    return float(completion.strip() == _text(answer).strip())


def numeric_match(completion: str, *, answer: Any, tolerance: float = 1e-6) -> float:
    """The last number in the completion equals the last number in the answer, up to a relative tolerance.

    Thousands separators are understood, and so is GSM8K's `#### 72` with all the text before it.
    """
    expected, found = _last_number(_text(answer)), _last_number(completion)
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return float(found is not None and abs(found - expected) <= tolerance * max(1.0, abs(expected)))


def math_verify(completion: str, *, answer: Any) -> float:
    """The completion's final expression (boxed, LaTeX or plain) equals the answer, as the math-verify library sees it.

    The library's own timeouts are off: they need SIGALRM, and the pool's deadline kills what it cannot interrupt.
    """
    from math_verify import parse, verify  # sympy takes a third of a second to import

    text = _text(answer)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not a mathematical expression")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(completion: str, *, row: dict[str, Any]) -> float:
    """The judgement, 0 to 1, of the reasoning-gym dataset that the row comes from (data.path: reasoning_gym:NAME)."""
    from generation.rollouts.environments.reasoning_gym import score

    return score(completion, row)


class FormatRegex:
    """The completion as a whole matches `pattern`; a dot matches line breaks too."""

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
    """The completion's final expression, as sympy writes it: x + 1 and 1 + x are one vote, 1/2 and 0.5 are two."""
    from math_verify import parse

    found = parse(completion, parsing_timeout=None)
    return str(found[0]) if found else None


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
"""The part of a completion that each of them compares with the answer; None where there is none."""
