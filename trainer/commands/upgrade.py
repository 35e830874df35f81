"""`hotbunk upgrade`: write keys by the names they have today."""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from generation.yaml_files import INCLUDES, fill_defaults
from trainer.config.recipe import RENAMED, renewed
from trainer.errors import UserError
from trainer.run.lock import RunLock
from trainer.run.records import write_whole

# A mapping's keys and values by name, with their places in the text.
Nodes = dict[str, tuple[yaml.ScalarNode, yaml.Node]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.description = (
        "Rewrite keys that had other names, and their values, in a recipe, in all recipes of a folder, or in a run's "
        "config.yaml and checkpoints. Comments stay; the changes are shown."
    )
    parser.add_argument("path", type=Path, help="a recipe, a folder of recipes, or the folder of a run")


def main(arguments: argparse.Namespace) -> int:
    """Rewrite whatever holds old keys, each file as a whole or not at all, and say what was changed.

    All recipes are read before the first is written. Raises UserError where there is nothing to upgrade, a run is under
    way, or something has to be mended by hand.
    """
    place: Path = arguments.path
    recipes = [place] if place.is_file() else sorted(place.glob("*.yaml"))
    checkpoints = sorted(marker.parent for marker in place.glob("checkpoints/step_*/COMPLETE"))
    if not recipes and not checkpoints:
        raise UserError(f"{place} is neither a recipe nor a folder that holds recipes (*.yaml) or a run's checkpoints")
    with ExitStack() as held:
        if checkpoints:
            lock = RunLock(place)
            held.callback(os.close, lock.descriptor)
            lock.take(0)
        files: dict[Path, tuple[str, list[str]]] = {}
        for path in recipes:
            _rewrite(path, "", files)
        changed = [(path, text, changes) for path, (text, changes) in files.items() if changes]
        for path, text, changes in changed:
            write_whole(path, text)
            print(f"{path}: {', '.join(changes)}")
        upgraded = [path for path in checkpoints if _upgrade_checkpoint(path)]
        for path in upgraded:
            print(f"{path}: the keys that a resumed run is compared by")
    if not changed and not upgraded:
        print(f"{place}: nothing to change")
    return 0


def _upgrade_checkpoint(path: Path) -> bool:
    from trainer.run.checkpoint import rewrite_extra  # which imports torch

    def change(extra: dict[str, Any]) -> dict[str, Any]:
        identity = extra.get("identity")
        return extra | {"identity": renewed(identity)} if isinstance(identity, dict) else extra

    return rewrite_extra(path, change)


def _rewrite(path: Path, section: str, files: dict[Path, tuple[str, list[str]]]) -> None:
    """Add to `files` a file's new text and its changes, and those of all that it includes; comments stay.

    `section`, with its dot, is that of a file that a section includes; "" for a whole recipe.
    """
    if path in files:
        return
    try:
        text = path.read_text("utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    edits: list[tuple[yaml.Node, str]] = []
    changes: list[str] = []
    files[path] = "", []  # should it include itself
    tops = _nodes(root)
    inner = {} if section else {f"{name}.": _nodes(value) for name, (_, value) in tops.items()}
    for prefix, nodes in {section: tops, **inner}.items():
        names = fill_defaults(_value(nodes[INCLUDES][1])) if INCLUDES in nodes else []
        for name in [names] if isinstance(names, str) else names:
            _rewrite(path.parent / name, prefix, files)
        for name, (key, value) in nodes.items():
            if new := RENAMED.get(prefix + name):
                leaf = new.key.removeprefix(prefix)
                if leaf in nodes:
                    raise UserError(f"{path} sets {prefix}{name} and {new.key}, which is the same key: leave one out")
                edits.append((key, leaf))
                changes.append(f"{prefix}{name} is now {new.key}")
                old = _value(value)
                if (now := new.value(old)) != old:
                    edits.append((value, str(now)))
                    changes[-1] += f": {now}"
                elif new.values and isinstance(old, str) and "${" in old:
                    raise UserError(f"{path}: {prefix}{name} is {old}: write it as {new.key} by hand")
    for node, words in sorted(edits, key=lambda edit: -edit[0].start_mark.index):
        text = text[: node.start_mark.index] + words + text[node.end_mark.index :]
    files[path] = text, changes


def _nodes(node: yaml.Node | None) -> Nodes:
    return {key.value: (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def _value(node: yaml.Node) -> Any:
    return yaml.constructor.SafeConstructor().construct_document(node)
