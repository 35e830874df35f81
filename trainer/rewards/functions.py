"""The built-in rewards, which a recipe names without an import string. All except reasoning_gym
return 1.0 or 0.0.

They are ordinary reward functions: they take the completion first, and by keyword the values that
they ask for. EXTRACTORS has the functions that extract an answer's vote for majority votes.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from trainer.errors import quoted

_CHOICE = re.compile(r"\(?([A-Za-z])\)?\.?")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completion: str, *, answer: Any) -> float:
    """Return 1.0 if the completion equals the answer, ignoring white space around either.

    42.0 may also be written 42, as a column of floats may hold whole numbers; true and false in any
    case. If the answer is a list, one of its items is enough.
    """
    text = completion.strip()
    for accepted in accepted_answers(answer):
        if text in spellings(accepted):
            return 1.0
        if isinstance(accepted, bool) and text.casefold() == str(accepted).casefold():
            return 1.0
    return 0.0


def numeric_match(completion: str, *, answer: Any, tolerance: float = 1e-6) -> float:
    """Return 1.0 if the last numbers in the completion and in the answer are equal, up to a
    relative tolerance.

    Numbers may have thousands separators. The answer may be GSM8K's, with text that ends in `####
    72`. If it is a list, one of its numbers is enough.
    """
    numbers = [_last_number(str(accepted)) for accepted in accepted_answers(answer)]
    expected = [number for number in numbers if number is not None]
    if not expected:
        raise ValueError(f"the answer {quoted(answer)} holds no number")
    number = _last_number(completion)
    if number is None:
        return 0.0
    return float(any(abs(number - right) <= tolerance * max(1.0, abs(right)) for right in expected))


def math_verify(completion: str, *, answer: Any) -> float:
    """Return 1.0 if the math-verify library finds the completion's final expression equal to the
    answer.

    Expressions may be boxed, LaTeX or plain. A completion that is the answer's text, or the same
    letter of a choice such as (B), is right, too. If the answer is a list, one of its items is
    enough. The library's own timeouts are off, since they need SIGALRM; the reward pool's deadline
    kills processes that it cannot interrupt.
    """
    from math_verify import parse, verify  # sympy takes a third of a second to import

    texts = [str(accepted).strip() for accepted in accepted_answers(answer)]
    golds = []
    for text in texts:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        if gold := parse(marked, parsing_timeout=None):
            golds.append(gold)
    if not golds:
        raise ValueError(f"the answer {quoted(answer)} is not a mathematical expression")
    if _letter(completion) in map(_letter, texts):
        return 1.0
    expressions = parse(completion, parsing_timeout=None)
    return float(any(verify(gold, expressions, timeout_seconds=None) for gold in golds))


def reasoning_gym(completion: str, *, row: dict[str, Any]) -> float:
    """Return the score, 0 to 1, by the reasoning-gym dataset that the row is from (data.path:
    reasoning_gym:NAME).
    """
    from generation.rollouts.environments.reasoning_gym import score

    return score(completion, row)


class FormatRegex:
    """Return 1.0 if the entire completion matches `pattern`, in which a dot also matches line
    breaks.

    The completion may also match together with the tag that the chat template has opened before it.
    Both count, since a pattern may have been written for either.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
            self.pattern = pattern
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completion: str, *, opened: str = "") -> float:
        texts = (completion, opened + completion)
        return float(any(self._pattern.fullmatch(text) for text in texts))


BUILTINS = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "math_verify": math_verify,
    "format_regex": FormatRegex,
    "reasoning_gym": reasoning_gym,
}


def _expression(completion: str) -> str | None:
    """Return the completion's final expression as sympy writes it: x + 1 equals 1 + x, but 1/2
    differs from 0.5.
    """
    from math_verify import parse

    expressions = parse(completion, parsing_timeout=None)
    return str(expressions[0]) if expressions else None


def accepted_answers(answer: Any) -> list[Any]:
    """Return the answers any of which is right: the items of a list, otherwise the answer alone.

    Raises ValueError if there is none, or if one is neither a text, a number nor a bool.
    """
    answers = answer if isinstance(answer, list | tuple) else [answer]
    accepted = [item for item in answers if not _missing(item)]
    if not accepted:
        raise ValueError("the row has no answer (data.answer_key names its column)")
    for item in accepted:
        if isinstance(item, dict):
            raise ValueError(
                f"the answer {quoted(item)} has fields: set data.answer_key to one, as column.field"
            )
        if isinstance(item, list | tuple):
            raise ValueError(
                f"the answer {quoted(answer)} is a list of lists: make it a list of accepted answers"
            )
    return accepted


def spellings(accepted: Any) -> list[str]:
    """Return the texts by which an accepted answer may be written: 42.0 also as 42."""
    texts = [str(accepted).strip()]
    if isinstance(accepted, float | Decimal) and math.isfinite(accepted) and accepted == int(accepted):
        texts.append(str(int(accepted)))
    return texts


def _missing(item: Any) -> bool:
    return item is None or (isinstance(item, float) and math.isnan(item))


def _letter(text: str) -> str:
    """Return the letter of a choice, such as B of "(B)" or "B."; a text of another kind as it is,
    stripped.
    """
    choice = _CHOICE.fullmatch(text.strip())
    return choice[1] if choice else text.strip()


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


EXTRACTORS: dict[str, Callable[[str], Any]] = {
    "exact_match": str.strip,
    "numeric_match": _last_number,
    "math_verify": _expression,
}
"""Functions that return the part of a completion that a reward compares with the answer, or
None.
"""
