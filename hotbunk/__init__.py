"""The public names of `trainer`, `generation` and `sharding` in one place.

    from hotbunk import ShardingManager, TrainConfig, VllmGeneration

Each is imported on first use, from the package that it lives in, and takes torch or vLLM with it
only then. A module of the user's that is called `trainer`, say, does not get in the way, unless the
program has imported it before.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parents[1]


def _package(name: str) -> ModuleType:
    """Return Hotbunk's package of that name. Raises ImportError if something else has been imported
    by it.
    """
    sys.path.insert(0, str(_ROOT))  # before the current folder, which may hold a module of that name
    try:
        package = import_module(name)
    finally:
        sys.path.remove(str(_ROOT))
    file = package.__file__ or str(package.__path__)
    if not Path(file).is_relative_to(_ROOT / name):
        raise ImportError(
            f"{file} has been imported as {name}, as Hotbunk's package is called: give it another name"
        )
    return package


_PACKAGES: dict[str, ModuleType] = {}
for _name in ("generation", "sharding", "trainer"):
    _PACKAGES |= dict.fromkeys((package := _package(_name)).__all__, package)
__all__ = sorted(_PACKAGES)


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_PACKAGES[name], name)
