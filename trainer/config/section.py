"""The base class of a recipe's sections, and the types of numbers and texts that keys hold.

Every number has a lower and an upper bound, wide enough for any run that could work: a deadline of
1e300 s overflows somewhere, and a number below 1e-20 is as good as 0 in float32.
"""

import difflib
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
)
from pydantic_core import CoreSchema, core_schema

from generation.paths import UnsetVariable, expanded

_LARGEST = 1e9


def key(default: Any, meaning: str, /, **values: str) -> Any:
    """Declare a key of a section: its default (`...` if it has none), its help text, and the help
    of its values.
    """
    extra: Any = {"values": values}
    return Field(default=default, description=meaning, json_schema_extra=extra)


def known(value: str, names: Sequence[str]) -> str:
    """Return a text that is one of `names`, or an import string; raise ValueError for any other."""
    if value not in names and ":" not in value:
        raise ValueError(f"should be one of {', '.join(names)}, or pkg.mod:Name or file.py:Name")
    return value


@dataclass(frozen=True, eq=False)
class OneOf:
    """Validates that a text is a name in a table, or, with `custom`, names a function, `pkg.mod:fn`
    or `file.py:fn`.
    """

    table: Mapping[str, Any]  # its entries have a `meaning`
    custom: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(core) | {"examples" if self.custom else "enum": [*self.table]}

    def _check(self, value: str) -> str:
        if value in self.table or (self.custom and ":" in value):
            return value
        names = [*map(repr, self.table), *["pkg.mod:fn", "file.py:fn"] * self.custom]
        close = difflib.get_close_matches(value, self.table, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"should be {', '.join(names[:-1])} or {names[-1]}{hint}")


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _zero_or_enough(value: float) -> float:
    if 0 < value < 0.01:
        raise ValueError("should be 0 (greedy) or at least 0.01, below which vLLM samples at 0.01")
    return value


class _Location(str):
    """A path in which `~` and variables are replaced."""

    written: str  # the path as the recipe has it


def _located(value: str) -> str:
    try:
        path = _Location(expanded(value))
    except UnsetVariable as error:
        raise ValueError(f"should name variables that exist: {error}") from error
    path.written = value
    return value if path == value else path


def expanded_argument(text: str) -> str:
    """Return an argument of a command, a path or a hub name, with `~` and variables replaced, as
    argparse's `type`.
    """
    try:
        return expanded(text)
    except UnsetVariable as error:
        raise ArgumentTypeError(str(error)) from error


def path_argument(text: str) -> Path:
    """Return the path that an argument of a command names, as argparse's `type`."""
    return Path(expanded_argument(text))


def _as_written(value: str) -> str:
    return value.written if isinstance(value, _Location) else value


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _word(value: str) -> str:
    return value if any(map(str.isspace, value)) else _located(value)


_NUMBER = BeforeValidator(_not_bool)
Count = Annotated[int, Field(ge=1, le=10**9), _NUMBER]
Natural = Annotated[int, Field(ge=0, le=10**9), _NUMBER]
Size = Annotated[int, Field(ge=1, le=2**16), _NUMBER]  # of things that are in memory at the same time
Processes = Annotated[int, Field(ge=1, le=256), _NUMBER]
Mebibytes = Annotated[int, Field(ge=1, le=2**20), _NUMBER]
# NumPy's range, since vLLM passes seeds on to NumPy
Seed = Annotated[int, Field(ge=0, lt=2**32), _NUMBER]
Positive = Annotated[float, Field(ge=1e-20, le=_LARGEST), _NUMBER]
Rate = Annotated[float, Field(ge=1e-20, le=1), _NUMBER]
NotNegative = Annotated[float, Field(ge=0, le=_LARGEST), _NUMBER]
Amount = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), _NUMBER]
Share = Annotated[float, Field(ge=0, le=1), _NUMBER]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1), _NUMBER]
Portion = Annotated[float, Field(ge=1e-6, le=1), _NUMBER]
Softness = Annotated[float, Field(ge=0.01, le=100), _NUMBER]
# vLLM's highest is 2
Temperature = Annotated[float, Field(ge=0, le=2), _NUMBER, AfterValidator(_zero_or_enough)]
# 1e6 s are eleven days; sockets count milliseconds in 32 bits
Seconds = Annotated[float, Field(ge=1, le=1e6), _NUMBER]
CallSeconds = Annotated[float, Field(ge=0.01, le=1e6), _NUMBER]  # for one call of user code
Text = Annotated[str, Field(min_length=1)]
Location = Annotated[
    Text,
    BeforeValidator(_text),
    AfterValidator(_located),
    PlainSerializer(_as_written, when_used="json"),
]
"""A path, or another text without `~` and `$`. A run's files have it as written, so that they suit
other machines.
"""
Word = Annotated[Text, AfterValidator(_word), PlainSerializer(_as_written, when_used="json")]
"""A word of a command: a `Location`, unless it has white space, as a shell's script has."""
Name = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=200)]
Dtype = Literal["float32", "bfloat16"]


KeyPath = tuple[str | int, ...]
"""The path of a value in a recipe: the keys, and indices of lists, that lead to it."""


def replaced(values: Any, texts: Mapping[KeyPath, str]) -> Any:
    """Copy plain containers and put each text at its path; a path that does not exist is
    ignored.
    """
    changed = deepcopy(values)
    for (*path, last), text in texts.items():
        with suppress(LookupError, TypeError):
            reduce(getitem, path, changed)[last] = text
    return changed


class Section(BaseModel):
    """The base class of all sections: unknown keys and NaN are errors, and nothing changes after
    loading.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )
