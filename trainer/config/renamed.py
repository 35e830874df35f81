"""Keys of a recipe that had another name: the one table by which an old key is refused, rewritten and compared.

`hotbunk upgrade` rewrites recipes, config.yaml and checkpoints by it; a run that continues from an older checkpoint is
compared with it by the names of today.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """A key's name today."""

    key: str  # its name today, in the same section
    values: Mapping[Any, Any] = field(default_factory=dict)  # old values that are written differently today

    def value(self, old: Any) -> Any:
        """The value to write today for one of the old key."""
        return next((new for was, new in self.values.items() if was == old and type(was) is type(old)), old)


RENAMED = {
    "algorithm.discount": Renamed("algorithm.gamma"),
    "algorithm.trace": Renamed("algorithm.gae_lambda"),
    "sync.zero_copy": Renamed("sync.way", {True: "zero_copy", False: "staged"}),
}


def refusal(old: str, value: Any) -> str:
    """The sentence about an old key, in a recipe or on the command line."""
    new = RENAMED[old]
    words = json.dumps(new.value(value), default=str)
    return f"{old} is now {new.key}: write {new.key}: {words}, or `hotbunk upgrade` the recipe or the run's folder"


def renewed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path, with old keys and their values written as today."""
    known = {old: RENAMED[old] for old in keys.keys() & RENAMED.keys()}
    return {known[k].key if k in known else k: known[k].value(v) if k in known else v for k, v in keys.items()}
