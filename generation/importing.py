"""Loads user code: objects named by import strings, `pkg.mod:Name` or `path/file.py:Name`."""

import difflib
import gc
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from generation.undoing import undone_by


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in the block: it takes a quarter of the time of importing a thousand modules."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def load(spec: str) -> Any:
    """Return the object that `spec` names; a file is imported only once. Raises ValueError where the form is wrong, the
    module or file is missing or cannot be imported, or it lacks the name.
    """
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{spec!r:.80} is not an import string: write pkg.mod:Name or path/file.py:Name")
    try:
        value: Any = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except FileNotFoundError as error:
        raise ValueError(f"{spec!r} cannot be loaded: {error}") from error
    except BaseException as error:  # the user's module may raise anything
        if isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt:
            raise  # raised by the caller's handler of a signal
        raise ValueError(f"{spec!r} cannot be loaded: importing it raised {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, [name for name in vars(value) if not name.startswith("_")], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{spec!r} cannot be loaded: {home} has no {name!r}{hint}")
        value = getattr(value, part)
    return value


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, registered so that its definitions can be pickled."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with undone_by(lambda: sys.modules.pop(name)):
        spec.loader.exec_module(module)
    return module


def importable(spec: str) -> str:
    """Return `module:Name` for `path/file.py:Name`, and any other spec as it is. Raises ValueError if there is no such
    file. Its folder is appended to the search path, which child processes inherit, so that vLLM's find the module, too.
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
