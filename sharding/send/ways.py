"""The former home of `Way` and `Staged`, for the transports of users; new ones inherit
`sharding.Transport`.
"""

from importlib import import_module
from typing import Any

_HOMES = {"Way": ("base", "Transport"), "Staged": ("staged", "Staged")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, present_name = _HOMES[name]
    return getattr(import_module(f"sharding.transports.{module}"), present_name)
