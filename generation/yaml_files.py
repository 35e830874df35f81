"""Read YAML files that include other files, with defaults that environment variables override.

    # Relative to this file; later files win, and this file wins over them all.
    includes: [base.yaml, sizes.yaml]
    engine:
      # Inside a section, a file's contents become part of the section.
      includes: [engine.yaml]
      # The environment variable MAX_SEQS if it is set, else 64.
      max_num_seqs: ${MAX_SEQS:64}

A value is read as YAML, even if it comes from the environment: `${NAME:[1, 2]}` is a list,
`${NAME:}` is null. Within a longer text it is inserted unchanged. `${NAME}` in capitals is short
for OmegaConf's `${oc.env:NAME}`, and OmegaConf interprets everything else that begins with `${`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import omegaconf.base
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._yaml import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_visitor import GrammarVisitor

from generation.paths import UnsetVariable, expanded

INCLUDES = "includes"

# The most that all interpolations may insert together, and the least that each one counts for.
_MOST_CHARACTERS = 2**20
_LEAST_CHARACTERS = 2**9
_IN_CAPITALS = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):([^{}]*)\}")


def read_yaml(path: Path) -> DictConfig:
    """Return a file's mapping with includes merged and defaults filled in, but `${a.b}` not yet
    resolved. Raises ValueError, naming the file and those that include it, where a file is missing,
    is not a mapping in valid YAML, or includes itself.
    """
    merged = OmegaConf.create(_read(path, ()))
    assert isinstance(merged, DictConfig)
    return merged


def fill_defaults(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """Return a value of plain containers with every `${NAME:default}` replaced, and `${NAME}` made
    `${oc.env:NAME}`.
    """
    if isinstance(value, dict):
        return {key: fill_defaults(inner, environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill_defaults(inner, environ) for inner in value]
    if not isinstance(value, str):
        return value
    if complete := _DEFAULT.fullmatch(value):
        return _typed(environ.get(complete[1], complete[2]), complete[1])
    value = _DEFAULT.sub(lambda match: environ.get(match[1], match[2]), value)
    return _IN_CAPITALS.sub(r"${oc.env:\1}", value)


class _CountingVisitor(GrammarVisitor):
    """Limits the characters that interpolations insert, since OmegaConf (2.4) does not; counts
    before inserting.
    """

    characters_left = 0

    def visitInterpolation(self, ctx: Any) -> Any:
        return self.spend(super().visitInterpolation(ctx), least=_LEAST_CHARACTERS)

    @classmethod
    def spend(cls, value: Any, least: int = 0) -> Any:
        cls.characters_left -= max(least, len(str(value)))
        if cls.characters_left < 0:
            raise ValueError
        return value


def resolve(value: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping of plain containers with OmegaConf's interpolations resolved. Raises
    ValueError where they insert more than 2^20 characters, before that memory is used, and
    OmegaConf's errors where one cannot be resolved.
    """
    vars(omegaconf.base)["GrammarVisitor"] = _CountingVisitor
    _CountingVisitor.characters_left = _MOST_CHARACTERS + len(str(value))
    try:
        return _plain(OmegaConf.create(value))  # type: ignore[no-any-return]
    except (ValueError, OmegaConfBaseException) as error:
        if _CountingVisitor.characters_left >= 0:
            raise
        text = (
            f"interpolations insert more than {_MOST_CHARACTERS} characters: let fewer of them refer to "
            "others"
        )
        raise ValueError(text) from error
    finally:
        vars(omegaconf.base)["GrammarVisitor"] = GrammarVisitor


def _plain(node: Any) -> Any:
    if isinstance(node, DictConfig):
        return {key: _plain(node[key]) for key in node}
    if isinstance(node, ListConfig):
        return [_plain(node[index]) for index in range(len(node))]
    return _CountingVisitor.spend(node)


def _typed(text: str, name: str) -> Any:
    """Parse a value as OmegaConf does in a file: as YAML, except that 1e-5 is a number."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{name} is {text!r}, which is not valid YAML") from error


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Read one file with its includes; `above` are the files that include it, the outermost
    first.
    """
    loaded = load_mapping(path, above)
    if os.path.realpath(path) in map(os.path.realpath, above):
        cycle = " includes ".join([str(above[0]), *(file.name for file in (*above[1:], path))])
        raise ValueError(f"{INCLUDES}: {cycle}, and so on without end")
    try:
        # OmegaConf has no default of its own that holds `;` or `<`, so it sees the text after
        # defaults are filled in
        values: Any = OmegaConf.to_container(OmegaConf.create(fill_defaults(loaded)), resolve=False)
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}{_included_by(above)} cannot be read: {first_line(error)}") from error
    for key, section in values.items():
        if isinstance(section, dict):
            values[key] = _with_includes(section, f"{key}.{INCLUDES}", path, above)
    return _with_includes(values, INCLUDES, path, above)


def _with_includes(
    values: dict[str, Any], key: str, path: Path, above: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the contents of the files that `values` includes, overridden by `values` itself."""
    if INCLUDES not in values:
        return values
    section = dict(values)
    names = section.pop(INCLUDES)
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: {key} is {names!r}, but should be a list of files")
    try:
        files = [path.parent / expanded(name) for name in names]
    except UnsetVariable as error:
        raise ValueError(f"{path}: {key}: {error}") from error
    parts = [_read(file, (*above, path)) for file in files]
    try:
        merged = OmegaConf.merge(*map(OmegaConf.create, [*parts, section]))
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{path}: {key}: these files do not merge with this one: {first_line(error)}"
        ) from error
    return OmegaConf.to_container(merged, resolve=False)  # type: ignore[return-value]


def load_mapping(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in a file as plain text: interpolations are not even parsed, and nothing
    is included.

    `above` are the files that include it, the outermost first. Raises ValueError, naming the file,
    where it is not a mapping in valid YAML, or has more than 10,000 values by aliases;
    RecursionError where it is nested too deep.
    """
    by = _included_by(above)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}{by} is not a file: name one")  # a pipe would have no end
    try:
        with path.open(encoding="utf-8") as file:
            loaded = yaml.load(file, get_yaml_loader())  # as OmegaConf.load, with its limit on aliases
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such recipe file{by}") from error
    except (OSError, ValueError, OmegaConfBaseException) as error:  # such as a number of 5000 digits
        raise ValueError(f"{path}{by} cannot be read: {first_line(error)}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}{by} is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:  # the file is empty
        return {}
    if not isinstance(loaded, dict):
        kind = "a list" if isinstance(loaded, list) else "a single value"
        raise ValueError(f"{path}{by} must be a mapping of keys such as model and data, not {kind}")
    return loaded


def _included_by(above: tuple[Path, ...]) -> str:
    return f", which {above[-1]} includes" if above else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
