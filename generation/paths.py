"""Paths as people write them: with `~`, and with variables of the environment."""

import os
import re

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


class UnsetVariable(ValueError):
    """A path names a variable that is not set; the text is a sentence about the variable."""


def expanded(path: str) -> str:
    """Return a path with `~`, `$NAME` and `${NAME}` replaced, as a shell does it. Raises
    UnsetVariable.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise UnsetVariable(f"${name} is not set in the environment: set it, or write the path out")
        return os.environ[name]

    return _VARIABLE.sub(value, os.path.expanduser(path))
