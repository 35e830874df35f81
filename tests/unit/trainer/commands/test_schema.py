"""The JSON Schema of recipes, by the jsonschema package."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainer.commands.schema import recipe_schema
from trainer.config.recipe import known_keys

RECIPES = sorted((Path(__file__).parents[4] / "scripts" / "recipes").glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(recipe_schema())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_follow_the_schema_that_their_first_line_names(path: Path) -> None:
    first, _, text = path.read_text().partition("\n")
    file = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(file.read_text()) == recipe_schema(), f"write it anew: hotbunk schema > {file}"
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "recipe",
    [
        {"polcy": {}},
        {"policy": {"learning_rate": 1e-5}},
        {"policy": {"backend": "megatron"}},
        {"algorithm": {"preset": "grpo2"}},
        {"batch": {"prompts_per_step": 0}},
    ],
)
def test_invalid_recipes_are_invalid_by_the_schema(recipe: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(
        {"run": {"name": "a"}, "model": {"path": "a"}, "data": {"path": "a"}} | recipe
    )


def test_every_key_has_its_meaning_in_the_schema() -> None:
    sections = recipe_schema()["$defs"].values()
    described = {
        (name, value.get("description"))
        for s in sections
        for name, value in s.get("properties", {}).items()
    }
    keys = [(path.rpartition(".")[2], field.description) for path, field in known_keys() if "." in path]
    assert {(name, meaning) for name, meaning in keys if name not in ("N", "NAME")} <= described
