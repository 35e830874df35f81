"""Reading of a recipe's file and overrides into a `TrainConfig`, or into a sentence about each key
that is wrong.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from generation.paths import UnsetVariable, expanded
from generation.yaml_files import fill_defaults, first_line, read_yaml, resolve
from trainer.config.accelerate import policy_keys
from trainer.config.algorithm import PRESET_KEYS
from trainer.config.lora_start import adapter_keys
from trainer.config.schema import TrainConfig
from trainer.config.section import KeyPath, replaced
from trainer.config.suggestions import counterparts, suggestion
from trainer.errors import UserError, quoted

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_DEEPEST = 32  # levels of nested lists and mappings


RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "algorithm.discount": ("algorithm.gamma", {}),
    "algorithm.trace": ("algorithm.gae_lambda", {}),
    "data.eval_path": ("eval.datasets.NAME.path", {}),
    "data.eval_size": ("eval.datasets.NAME.size", {}),
    "data.eval_split": ("eval.datasets.NAME.split", {}),
    "policy.offload_optimizer": ("policy.update_on", {True: "host", False: "device"}),
    "engine.apart": ("engine.placement", {0: "shared", int: "ranks, and engine.ranks: {}"}),
    "sync.zero_copy": ("sync.way", {True: "zero_copy", False: "staged"}),
}
"""Former names of keys: the present name of each, and the old values, or types of values, that have
changed as well.
"""

_TRUNCATED = "when sampling is truncated the engine's probabilities are not the policy's"
REFUSED = {
    "rollout.order": "engines begin prompts in the order of the data",
    # The engine renormalises over the remaining tokens, and the trainer does not
    "sampling.top_p": _TRUNCATED,
    "sampling.top_k": _TRUNCATED,
    "sampling.min_p": _TRUNCATED,
}
"""Keys that do not exist, or not any more, and nothing stands for: the reason of each."""


def load_config(recipe: Path, overrides: list[str]) -> TrainConfig:
    """Read a recipe, apply overrides (`section.key=value`, value in YAML), and check types and
    ranges.

    Raises UserError with one sentence for every key that is unknown, is missing or has a wrong
    value.
    """
    try:
        unresolved, values = _values(recipe, overrides)
    except RecursionError as error:
        deep = "has lists or mappings that are nested too deep: make it flatter"
        raise UserError(f"{recipe}, or one of its overrides, {deep}") from error
    if odd := list(_odd_values(values)):
        raise UserError(*odd)
    if isinstance(run := values.setdefault("run", {}), dict) and not run.get("name"):
        run["name"] = recipe.stem
    policy = values.get("policy")
    file = policy.get("accelerate_config") if isinstance(policy, dict) else None
    if isinstance(policy, dict) and isinstance(file, str | int | float) and file != "":
        # The schema refuses ""
        try:
            values["policy"] = policy_keys(Path(expanded(str(file)))) | policy
        except UnsetVariable as error:
            raise UserError(f"policy.accelerate_config: {error}") from error
    lora = values.get("lora")
    if isinstance(lora, dict) and isinstance(start := lora.get("start"), str):
        values["lora"] = adapter_keys(start) | lora
    _name_tasks(values)
    secrets = dict(_from_environment(unresolved, values))
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(*sentences(error, values, masked(replaced(values, secrets)))) from error
    config.keep_unresolved(secrets)
    return config


def _name_tasks(values: Any) -> None:
    """Set data.path to the tasks of rollout.verifiers, unless the recipe has another path, which is
    refused later.
    """
    rollout = values.get("rollout")
    section = rollout.get("verifiers") if isinstance(rollout, dict) else None
    if not isinstance(section, dict) or not isinstance(data := values.setdefault("data", {}), dict):
        return
    if str(data.get("path", "verifiers:")).startswith("verifiers:"):  # a run's config.yaml has it
        data |= {
            "path": f"verifiers:{section.get('environment')}",
            "subset": json.dumps(section, default=str),
        }


def _from_environment(unresolved: Any, values: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield, with their paths, the texts of a recipe that contain an `${oc.env:NAME}`, or refer to
    one that does.
    """
    leaves = [(path, text, value) for path, text, value in _texts(unresolved, values) if "${" in text]
    direct = {str(value) for _, text, value in leaves if "oc.env" in text} - {""}
    for path, text, value in leaves:
        if "oc.env" in text or any(secret in str(value) for secret in direct):
            yield path, text


def _texts(unresolved: Any, values: Any, *path: str | int) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield the path of each text, the text, and its resolved value."""
    if isinstance(unresolved, str):
        yield path, unresolved, values
    elif isinstance(unresolved, dict):
        for key, inner in unresolved.items():
            yield from _texts(inner, values[key], *path, str(key))
    elif isinstance(unresolved, list):
        for index, inner in enumerate(unresolved):
            yield from _texts(inner, values[index], *path, index)


def _values(recipe: Path, overrides: list[str]) -> tuple[Any, Any]:
    """Return the recipe's mapping with includes and overrides, first unresolved, then with
    interpolations filled in.
    """
    try:
        merged = read_yaml(recipe)
    except ValueError as error:
        raise UserError(str(error)) from error
    if any(override.startswith("algorithm.preset=") for override in overrides):
        # In a run's config.yaml, for example, where a preset has set keys
        section = merged.get("algorithm")
        for key in PRESET_KEYS if isinstance(section, DictConfig) else ():
            section.pop(key, None)
    for override in overrides:
        try:
            merged.merge_with_dotlist([override])
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
            raise UserError(
                f"--{override} cannot be applied to {recipe}: {first_line(error)}"
            ) from error
    try:
        overridden = fill_defaults(OmegaConf.to_container(merged, resolve=False))
        return overridden, resolve(overridden)
    except (OmegaConfBaseException, ValueError) as error:
        wrong_key = getattr(error, "full_key", None)
        reason = f"{wrong_key}: {first_line(error)}" if wrong_key else first_line(error)
        raise UserError(f"{recipe}: {reason}") from error


def sentences(error: ValidationError, values: Any, public: Any = None) -> list[str]:
    """Return a sentence for each wrong key of `values`, which failed to validate. `public` are the
    values without secrets.
    """
    grouped: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors():
        path = _path(details, values)
        with suppress(LookupError, TypeError):  # the path does not exist
            details["input"] = details["input"] if public is None else reduce(getitem, path, public)
        grouped.setdefault(path, []).append(details)
    written: list[str] = []
    for path, errors in grouped.items():
        key = ".".join(map(str, path)) or "it"
        if errors[0]["type"] == "extra_forbidden":
            written += [
                _unknown(inner, value) for inner, value in _unknown_keys(key, errors[0]["input"])
            ]
        else:
            written.append(_sentence(key, errors))
    return written


def to_yaml(config: TrainConfig, mask: bool = False) -> str:
    """Return the configuration as YAML, for a run's files and `load_config`; or, masked, for
    display.
    """
    recipe = masked(config.recorded()) if mask else config.recorded()
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)


def masked(value: Any, key: str = "", hidden: str = "env") -> Any:
    """Replace interpolations, and values of mappings named `hidden`, by *** in a recorded recipe or
    a part of it.
    """
    if key == hidden and value:
        return dict.fromkeys(value, "***") if isinstance(value, dict) else "***"
    if isinstance(value, dict):
        return {name: masked(inner, str(name), hidden) for name, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, "", hidden) for inner in value]
    while isinstance(value, str) and (shorter := re.sub(r"\$\{[^{}]*\}", "***", value)) != value:
        value = shorter
    return value


def known_keys(
    model: type[BaseModel] = TrainConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its dotted path, a section before its keys; N is an index in a list,
    NAME any name.
    """
    for name, field in model.model_fields.items():
        yield prefix + name, field
        # Of `Section | None`, say, the section
        alternatives = [field.annotation]
        if get_origin(field.annotation) in (Union, UnionType):
            alternatives += get_args(field.annotation)
        for inner in alternatives:
            path = f"{prefix}{name}."
            if (origin := get_origin(inner)) in (list, dict):
                inner = get_args(inner)[-1]
                path = path + ("N." if origin is list else "NAME.")
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from known_keys(inner, path)


def _odd_values(value: Any, *path: str) -> Iterator[str]:
    """Yield sentences about values that no key takes: those nested too deep, and texts with NUL or
    not in UTF-8.
    """
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    if len(path) > _DEEPEST:
        yield f"{'.'.join(path[:3])} holds lists or mappings more than {_DEEPEST} deep: make it flatter"
        return
    for key, inner in inside:
        yield from _odd_values(inner, *path, str(key))
    if isinstance(value, str) and ("\0" in value or value != value.encode(errors="replace").decode()):
        yield f"{'.'.join(path)} is {quoted(value)}, but should be text in UTF-8 without NUL characters"


def _path(error: ErrorDetails, values: Any) -> KeyPath:
    """Return the path of the value that an error is about; Pydantic's location also names members
    of a union.
    """
    path: list[str | int] = []
    for part in error["loc"]:
        if isinstance(values, dict):
            there = part in values
        else:
            there = isinstance(values, list) and isinstance(part, int)
        if not there and error["type"] != "missing":
            break
        path.append(part)
        beyond = there and isinstance(values, list) and len(values) <= int(part)
        values = values[part] if there and not beyond else None
    return tuple(path)


def _sentence(key: str, errors: list[ErrorDetails]) -> str:
    """Return the sentence about one key; each member of a union may have an error of its own."""
    error = errors[0]
    if error["type"] == "missing":
        return f"{key} is missing: set it in the recipe or by --{key}"
    if error["type"] == "string_pattern_mismatch":
        return (
            f"{key} is {quoted(error['input'])}, but may have only letters, digits, '_', '-' and, "
            "inside, '.'"
        )
    return (
        f"{key} is {quoted(error['input'])}, but should "
        f"{' or '.join(dict.fromkeys(map(_wanted, errors)))}"
    )


def _wanted(error: ErrorDetails) -> str:
    for bound, words in _BOUNDS.items():
        if bound in error.get("ctx", {}):
            return (
                f"be {words} "
                f"{error['ctx'][bound]:{'g' if isinstance(error['ctx'][bound], float) else 'd'}}"
            )
    reason = re.sub(r"^(Value error, )?(\w+ )?should ", "", error["msg"])
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of keys", reason)


def _unknown_keys(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an unknown key with its value; for a section of another trainer the keys inside it."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict) and key not in counterparts():
        for name, inner in value.items():
            inside += _unknown_keys(f"{key}.{name}", inner)
    if any(name in counterparts() for name, _ in inside):
        yield from inside
    else:
        yield key, value


def _unknown(key: str, value: Any) -> str:
    """Return the sentence about a key that does not exist, or not any more."""
    if key in RENAMED:
        new, values = RENAMED[key]
        words = json.dumps(value, default=str)
        if isinstance(value, bool | int):
            words = str(values.get(value, values.get(type(value), words))).format(words)
        return f"{key} is now {new}: write {new}: {words}"
    if key in REFUSED:
        return f"{key} is {quoted(value)}, but {REFUSED[key]}: leave it out"
    general = re.sub(r"^(eval\.datasets)\.[^.]+\.", r"\1.NAME.", key)
    general = re.sub(r"\.\d+\.", ".N.", general)
    hint = suggestion(general, [name for name, _ in known_keys()]) or "; see --help for all of them"
    return f"{key} is not a known key{hint}"
