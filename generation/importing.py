"""User code named by `pkg.mod:Name` or `path/file.py:Name`, where vLLM's own processes must find it, too."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def importable(spec: str) -> str:
    """`module:Name` for `path/file.py:Name`, whose folder joins the end of the search path, which children inherit.

    Raises:
        ValueError: there is no such file.
    """
    home, colon, name = spec.rpartition(":")
    if not home.endswith(".py"):
        return spec
    path = Path(home).resolve()
    if not os.path.isfile(path):
        raise ValueError(f"{spec!r} cannot be loaded: there is no file {home}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return f"{path.stem}{colon}{name}"


def load(spec: str) -> Any:
    """What `module:Name` names. Raises ValueError where it cannot be imported."""
    home, colon, name = spec.partition(":")
    if not colon or not home or not name:
        raise ValueError(f"{spec!r} must be pkg.mod:Name or path/file.py:Name")
    try:
        found: Any = importlib.import_module(home)
        for part in name.split("."):
            found = getattr(found, part)
    except BaseException as error:  # whatever the user's module does while it is imported
        if isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt:
            raise  # a signal's, by the caller's own handler
        raise ValueError(f"{spec!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return found
