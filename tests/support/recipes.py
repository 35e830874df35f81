"""Recipes of which a test names only what it is about."""

from collections.abc import Mapping
from typing import Any

from trainer.config.schema import TrainConfig

Sections = Mapping[str, Mapping[str, Any]]


def merged(*recipes: Sections) -> dict[str, dict[str, Any]]:
    """Merge recipes section by section; of two values of a key the later one stands."""
    sections: dict[str, dict[str, Any]] = {}
    for recipe in recipes:
        for name, keys in recipe.items():
            sections[name] = sections.get(name, {}) | dict(keys)
    return sections


def make_config(*recipes: Sections, **sections: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with these sections, and with placeholders for model and data."""
    placeholders = {"model": {"path": "m"}, "data": {"path": "d"}}
    return TrainConfig.model_validate(merged(placeholders, *recipes, sections))
