"""Objects a recipe names: `pkg.mod:Name` or `path/file.py:Name`."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import Interrupted, UserError, shown


def load_object(spec: str) -> Any:
    """Import what `spec` names; a file is imported once, whatever asks for it.

    Raises UserError when the form is wrong, the module or file is not there or fails to import, or lacks the name.
    """
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not name.isidentifier():
        raise UserError(f"{shown(spec)} names nothing that can be imported: write pkg.mod:Name or path/file.py:Name")
    try:
        module = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except FileNotFoundError as error:
        raise UserError(f"{shown(spec)} cannot be loaded: {error}") from error
    except Interrupted:
        raise
    except BaseException as error:  # whatever the user's module does while it is imported, KeyboardInterrupt included
        reason = f"importing it raised {type(error).__name__}: {error}"
        raise UserError(f"{shown(spec)} cannot be loaded: {reason}") from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, [known for known in vars(module) if not known.startswith("_")], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{spec!r} cannot be loaded: {home} has no {name!r}{hint}")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, registered so that what it defines can be pickled."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # as it has for every .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
