#!/usr/bin/env python3
"""Write the reference pages of docs/: configuration.md, command-line.md, python.md, and the table in migration.md.

.venv/bin/python scripts/reference.py            # writes them
.venv/bin/python scripts/reference.py --check    # writes nothing; fails if one of them is not current
"""

import argparse
import contextlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints, is_typeddict
from unittest.mock import patch

from pydantic import BaseModel

import generation
import hotbunk
import sharding
import trainer
from trainer.cli import describe_keys, parse, value_meanings
from trainer.config.recipe import known_keys
from trainer.config.schema import TrainConfig
from trainer.config.suggestions import TABLE as OTHER_TRAINERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 100
TABLE_NOTE = "<!-- Written by scripts/reference.py: change trainer/config/other_trainers.md, then run it again. -->"
NOTE = "<!-- Written by scripts/reference.py: change the code, then run it again. -->\n"
FORMULAS = ("trainer.algorithms.advantages", "trainer.algorithms.losses", "trainer.algorithms.kl")
FIELDS = dict(known_keys())
EXAMPLES = {
    "trainer": """\
from hotbunk import TrainConfig

recipe = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "algorithm": {"preset": "dapo"}}
config = TrainConfig.model_validate(recipe)  # raises pydantic.ValidationError for a wrong key or value
assert config.algorithm.clip_high == 0.28 and config.run.steps == 100
""",
    "generation": """\
from hotbunk import LoadBalancer


class Replica:
    def __init__(self, unfinished):
        self.unfinished = unfinished

    def get_num_unfinished_requests(self):
        return self.unfinished

    def get_cache_usage(self):
        return 0.5


balancer = LoadBalancer([Replica(7), Replica(2)], strategy="requests")
assert balancer.select_actor() == 1
""",
    "sharding": """\
from hotbunk import SyncSettings

settings = SyncSettings(bucket_bytes=64 * 2**20, verify="full")
assert settings.timeout == 300
""",
    FORMULAS[0]: """\
import torch
from trainer.algorithms import advantages

rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])  # one prompt, a group of four
expected = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
assert torch.allclose(advantages.group_relative(rewards), expected, atol=1e-3)
""",
}


def configuration() -> str:
    """Return the page about all keys of a recipe."""
    schema = TrainConfig.model_json_schema()
    lines = [
        "# Configuration",
        NOTE,
        "A recipe is a YAML file with the sections below. `--section.key value` overrides a key on the command line. "
        "In paths, `~`, `$NAME` and `${NAME}` are replaced as a shell does it; a run's files have them as written. "
        "NAME stands for a name of your choice and N for an index in a list. `hotbunk schema` prints the same as a "
        "JSON Schema, with which editors complete keys. The [tutorial](tutorial.md) begins with a recipe of 11 lines.",
    ]
    for name, property_ in schema["properties"].items():
        for path, definition in nested(name, property_, schema["$defs"]):
            lines += ["", f"## {path}", "", " ".join(definition["description"].split()), ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
            lines += [row(path, key, definition) for key in definition["properties"]]
    return "\n".join(lines) + "\n"


def nested(
    path: str, schema: dict[str, Any], definitions: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections that a key's schema refers to, with their paths, and the sections within them."""
    if "$ref" in schema:
        definition = definitions[schema["$ref"].rpartition("/")[2]]
        yield path, definition
        for name, inner in definition["properties"].items():
            yield from nested(f"{path}.{name}", inner, definitions)
    for inner in schema.get("anyOf", []):
        yield from nested(path, inner, definitions)
    for keyword, step in (("items", "N"), ("additionalProperties", "NAME")):
        if isinstance(inner := schema.get(keyword), dict):
            yield from nested(f"{path}.{step}", inner, definitions)


def row(section: str, name: str, definition: dict[str, Any]) -> str:
    """Return the row of one key of a section: its path, type, default and meaning, and the meanings of its values."""
    schema, path = definition["properties"][name], f"{section}.{name}"
    required = name in definition.get("required", [])
    default = "required" if required else f"`{json.dumps(schema.get('default'), ensure_ascii=False)}`"
    values = value_meanings(FIELDS[path]) if path in FIELDS else schema.get("values", {})
    meaning = "<br>".join(
        [schema.get("description", ""), *(f"`{value}`: {text}" for value, text in values.items())]
    )
    if "$ref" in schema:
        default = ""
    return (
        "| "
        + " | ".join(cell.replace("|", "\\|") for cell in (f"`{path}`", kind(schema), default, meaning))
        + " |"
    )


def kind(schema: dict[str, Any]) -> str:
    """Return the type and the range of a key in words, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(kind, schema["anyOf"])))
    if values := schema.get("enum") or schema.get("examples"):
        return " or ".join(f"`{value}`" for value in values) + (
            " or a name" if "examples" in schema else ""
        )
    name = {"object": "mapping", "array": "list", "string": "text", "boolean": "true or false"}
    text = name.get(schema.get("type", "object"), schema.get("type", ""))
    if "const" in schema:
        return f"`{schema['const']}`"
    bounds = {"from": ("minimum", "exclusiveMinimum"), "to": ("maximum", "exclusiveMaximum")}
    words = [
        f"{word} {schema[key]:{',' if schema[key] >= 1 else ''}}"
        for word, keys in bounds.items()
        for key in keys
        if key in schema
    ]
    below = " (excluded)" if "exclusiveMaximum" in schema else ""
    return " ".join([text, *words]) + below


def command_line() -> str:
    """Return the page with the help of every command."""
    commands = re.findall(r"^    (\w+)  ", help_of(), re.MULTILINE)
    lines = [
        "# Command line",
        NOTE,
        "Each command prints its text below with `--help`. The commands `train` and `sft` print all keys of "
        "a recipe as well ([Configuration](configuration.md)). The [tutorial](tutorial.md) shows the commands at work.",
        "",
        f"```\n{help_of()}```",
    ]
    for command in commands:
        lines += ["", f"## hotbunk {command}", "", f"```\n{help_of(command)}```"]
    return "\n".join(lines) + "\n"


def help_of(*command: str) -> str:
    """Return the help of a command, or of `hotbunk` itself, without the list of keys."""
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(WIDTH)), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            parse([*command, "--help"])
        keys = describe_keys(WIDTH)
    return (
        re.sub(r"[ \t]+$", "", printed.getvalue().replace(keys, ""), flags=re.MULTILINE).strip() + "\n"
    )


def python() -> str:
    """Return the page about the public names."""
    lines = [
        "# Python",
        NOTE,
        "The public names of each package, with signatures and the first paragraphs of their docstrings. `hotbunk` "
        "exports all of them. [Engines](engines.md), [The weight path](weight-path.md) and [Rollouts](rollouts.md) "
        "explain their use, [Interfaces](interfaces.md) that of the names that other projects know.",
    ]
    for package in (trainer, generation, sharding):
        lines += section(package, [(name, getattr(hotbunk, name)) for name in sorted(package.__all__)])
    for name in FORMULAS:
        module = import_module(name)
        lines += section(module, list(functions_of(module)))
    return "\n".join(lines) + "\n"


def section(module: ModuleType, members: list[tuple[str, Any]]) -> list[str]:
    """Return the lines about a package or module and its public names."""
    lines = ["", f"## {module.__name__}", "", paragraph(module)]
    if example := EXAMPLES.get(module.__name__):
        lines += ["", f"```python\n{example}```"]
    for name, member in members:
        lines += ["", f"### {name}", "", *described(name, member)]
    return lines


def functions_of(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions that a module defines."""
    for name, member in inspect.getmembers(module, inspect.isfunction):
        if member.__module__ == module.__name__ and not name.startswith("_"):
            yield name, member


def described(name: str, member: Any) -> list[str]:
    """Return the lines about a public name: its signature, its docstring's first paragraph, and its public members."""
    if isinstance(member, str):
        return [f"`{member!r}`"]
    if not (inspect.isclass(member) or inspect.isfunction(member)):  # an alias of a type
        return [f"`{plain(str(member))}`"]
    lines = [f"```\n{signature(name, member)}\n```", "", paragraph(member)]
    if (
        rows := list(members_of(member))
        if inspect.isclass(member) and not issubclass(member, BaseModel)
        else []
    ):
        lines += ["", "| member | |", "|---|---|", *rows]
    return lines


def members_of(owner: type) -> Iterator[str]:
    """Yield a row of a table for each public method and property that a class has from these packages."""
    for name, attribute in inspect.getmembers_static(owner):
        home = next(base for base in owner.__mro__ if name in vars(base))
        if name.startswith("_") or home.__module__.split(".")[0] not in (
            "trainer",
            "generation",
            "sharding",
        ):
            continue
        if isinstance(attribute, property):
            text = name
        elif inspect.isroutine(getattr(owner, name)):
            text = (
                signature(name, getattr(owner, name))
                .replace("\n    ", " ")
                .replace("( ", "(")
                .replace(",\n)", ")")
            )
        else:
            continue
        yield f"| `{text}` | {paragraph(attribute)} |".replace("\n", " ").replace(" | None", " \\| None")


def paragraph(member: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(member) or "").partition("\n\n")[0].split())


def signature(name: str, member: Any) -> str:
    """Return a signature as it is written in code, with one parameter per line where it is long."""
    if is_typeddict(member):
        fields = [
            f"    {key}: {plain(inspect.formatannotation(kind))}"
            for key, kind in get_type_hints(member).items()
        ]
        return "\n".join([f"class {name}(TypedDict):", *fields])
    if getattr(member, "_is_protocol", False):
        return f"class {name}(Protocol)"
    try:
        call = inspect.signature(member)
    except ValueError:  # an exception that inherits its constructor
        return f"class {name}({member.__base__.__name__})"
    if inspect.isclass(member) and issubclass(member, BaseModel):
        return f"{name}(*, {', '.join(member.model_fields)})"
    words: list[str] = []
    for parameter in call.parameters.values():
        if parameter.name in ("self", "_ray_trace_ctx"):
            # Ray adds the latter to the methods of its actors
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(plain(str(parameter.replace(default=DefaultText(parameter.default)))))
    returned = (
        ""
        if call.return_annotation in (call.empty, None)
        else f" -> {inspect.formatannotation(call.return_annotation)}"
    )
    returned = re.sub(r"^ -> '(.*)'$", r" -> \1", plain(returned))
    start = f"async {name}" if inspect.iscoroutinefunction(member) else name
    line = f"{start}({', '.join(words)}){returned}"
    if len(line) <= WIDTH:
        return line
    return "\n    ".join([f"{start}(", *(f"{word}," for word in words)]) + f"\n){returned}"


class DefaultText:
    """A default value whose representation is the text that stands for it in code."""

    def __new__(cls, value: Any) -> Any:
        return value if value is inspect.Parameter.empty else super().__new__(cls)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, BaseModel):
            return f"{type(self.value).__name__}()"
        return getattr(self.value, "__name__", "") or re.sub("<factory>", "…", repr(self.value))


def plain(text: str) -> str:
    """Return types without the modules of their classes, and without quotation marks."""
    text = re.sub(
        r"\b(?:[a-z_]\w*\.)+(?=[A-Z])|\b(?:torch\.distributed|collections|typing)\.[a-z_.]*(?=[A-Z])",
        "",
        text,
    )
    return re.sub(r"(: |-> )'(\w[\w.]*)'", r"\1\2", text).replace("~T", "T")


def migration() -> str:
    """Return the page for people from other trainers, which is written by hand except for the table of keys."""
    page = (DOCS / "migration.md").read_text()
    beginning, _, rest = page.partition(TABLE_NOTE)
    _, _, end = rest.partition("\n\n")
    return f"{beginning}{TABLE_NOTE}\n{OTHER_TRAINERS.read_text().rstrip()}\n\n{end}"


PAGES = {
    "configuration.md": configuration,
    "command-line.md": command_line,
    "python.md": python,
    "migration.md": migration,
}


def stale_pages() -> list[str]:
    """Return the names of the pages that are not what the code describes now."""
    return [
        name
        for name, write in PAGES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != write()
    ]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the reference pages of docs/ from the code.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is not current"
    )
    check = parser.parse_args().check
    stale = stale_pages()
    for name in stale:
        if check:
            print(
                f"docs/{name} is not current: run .venv/bin/python scripts/reference.py", file=sys.stderr
            )
        else:
            (DOCS / name).write_text(PAGES[name]())
            print(f"docs/{name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
