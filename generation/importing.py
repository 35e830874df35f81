"""Load user code: objects named by import strings, `pkg.mod:Name` or `path/file.py:Name`.

The folder of a file becomes a package of a private name, so that a file and its neighbours are one
family: each may import the others, as beside a script, and nobody else can. Nothing is put on the
search path for them, where a neighbour called `trainer.py` would take our package's place, and
where two folders could not both have a `helpers.py`.

    mine/reward.py          is imported as    beside_a1b2c3d4.reward
    import helpers          in that file      beside_a1b2c3d4.helpers, which is mine/helpers.py
"""

import builtins
import difflib
import gc
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from generation.paths import UnsetVariable, expanded
from generation.undoing import undone_by

_FAMILY = "beside_"
"""The beginning of the private name of a folder's package."""

_NOT_NEIGHBOURS = sys.stdlib_module_names | {"generation", "hotbunk", "sharding", "trainer"}
"""Names that mean the same module in every file, whatever the files beside it are called."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection in the block: it takes a quarter of the time of importing a
    thousand modules.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def load(spec: str) -> Any:
    """Return the object that `spec` names; a file is imported only once. Raises ValueError where
    the form is wrong, the module or file is missing or cannot be imported, or it lacks the name.
    """
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{spec!r:.80} is not an import string: write pkg.mod:Name or path/file.py:Name"
        )
    try:
        value: Any = (
            _load_file(Path(expanded(home))) if home.endswith(".py") else importlib.import_module(home)
        )
    except (FileNotFoundError, UnsetVariable) as error:
        raise ValueError(f"{spec!r} cannot be loaded: {error}") from error
    except ModuleNotFoundError as error:
        raise ValueError(f"{spec!r} cannot be loaded: {_missing(error)}") from error
    except BaseException as error:  # the user's module may raise anything
        if isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt:
            raise  # raised by the caller's handler of a signal
        raise ValueError(
            f"{spec!r} cannot be loaded: importing it raised {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(
                part, [name for name in vars(value) if not name.startswith("_")], n=1
            )
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{spec!r} cannot be loaded: {home} has no {name!r}{hint}")
        value = getattr(value, part)
    return value


def _load_file(path: Path) -> ModuleType:
    """Import a file as a member of its folder's family, registered so that its definitions can be
    pickled.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    path = path.resolve()
    name = f"{_family(path.parent)}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_NeighbourLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with undone_by(lambda: sys.modules.pop(name)):
        spec.loader.exec_module(module)
    return module


def _family(folder: Path) -> str:
    """Return the name of the package that stands for a folder, and register it. It has no code of
    its own.
    """
    name = _FAMILY + hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


class _NeighbourFinder:
    """The finder on `sys.meta_path` for the members of families; all other names are left to
    Python's own finders.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a member, whose code will then import its neighbours; None for other
        names.
        """
        if not name.startswith(_FAMILY):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _NeighbourLoader(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _NeighbourFinder)


class _NeighbourLoader(SourceFileLoader):
    """A loader of a family's member, whose `import` statements look beside the file first."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code. Python takes `__import__` from the builtins of the importing
        module.
        """
        family = module.__name__.partition(".")[0]
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import_for(family)}
        super().exec_module(module)


def _import_for(family: str) -> Callable[..., ModuleType]:
    """Return the `__import__` of the members of a family."""

    def import_neighbour(
        name: str,
        variables: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        first = name.partition(".")[0]
        if level > 0 or not _is_neighbour(first, family):
            return builtins.__import__(name, variables, local, names, level)
        module = builtins.__import__(f"{family}.{name}", variables, local, names or ("__name__",))
        return module if names else sys.modules[f"{family}.{first}"]  # `import a.b` binds a

    return import_neighbour


def _is_neighbour(name: str, family: str) -> bool:
    """Return True if a file or folder beside the members of a family has this name.

    A folder without `__init__.py` may also hold something else, such as data, so that installed
    packages come first.
    """
    if name in _NOT_NEIGHBOURS:
        return False
    spec = PathFinder.find_spec(name, sys.modules[family].__path__)
    if spec is None:
        return False
    return spec.origin is not None or importlib.util.find_spec(name) is None


def _missing(error: ModuleNotFoundError) -> str:
    """Return a sentence about a module that does not exist: where it is imported, its name, and the
    remedy.
    """
    name = ".".join(part for part in (error.name or "").split(".") if not part.startswith(_FAMILY))
    remedy = "install the package that has it, or correct the name"
    frames = traceback.extract_tb(error.__traceback__)
    machinery = ("<frozen", __file__, str(importlib.__file__))
    importing = [frame for frame in frames if not frame.filename.startswith(machinery)]
    if not importing:
        return f"there is no module {name}: {remedy}"
    frame = importing[-1]
    absent = f"{name}, which is neither installed nor in {os.path.dirname(frame.filename)}"
    return f"{frame.filename}, line {frame.lineno}, imports {absent}: {remedy}"


def importable(spec: str) -> str:
    """Return `module:Name` for `path/file.py:Name`, and any other spec as it is. Raises ValueError
    if there is no such file. Its folder is appended to the search path, which child processes
    inherit, so that vLLM's find the module, too.
    """
    home, colon, name = spec.rpartition(":")
    if not home.endswith(".py"):
        return spec
    path = Path(expanded(home)).resolve()
    if not os.path.isfile(path):
        raise ValueError(f"{spec!r} cannot be loaded: there is no file {home}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return f"{path.stem}{colon}{name}"
