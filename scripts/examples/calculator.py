"""Level 2: a tool is a typed function, in a recipe `tools: [scripts/examples/calculator.py:calculate]`."""

import operator
import re

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(expression: str) -> int:
    """One operation on two whole numbers.

    Args:
        expression: such as 12+34; the operators are + - *
    """
    match = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if match is None:
        raise ValueError(f"{expression!r} is not one operation on two numbers")
    return int(_OPERATORS[match[2]](int(match[1]), int(match[3])))
