"""`hotbunk schema`: a JSON Schema of recipes, by which editors complete keys and show what they mean."""

import argparse
import json
from typing import Any

from generation.yaml_files import INCLUDES
from trainer.config.schema import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line takes nothing else."""
    parser.description = (
        "Print a JSON Schema of recipes. An editor with the YAML language server reads it from the file that a "
        "recipe's first line names: # yaml-language-server: $schema=FILE"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(recipe_schema(), indent=1))
    return 0


def recipe_schema() -> dict[str, Any]:
    """The schema of what a recipe's file may hold: the sections, and what only files have."""
    schema = TrainConfig.model_json_schema()
    others = {"type": ["string", "array"], "items": {"type": "string"}, "description": "files that join this section"}
    for section in (schema, *schema["$defs"].values()):
        section.get("properties", {})[INCLUDES] = others
        section.pop("required", None)  # what a file leaves out may be in one that it includes
    functions = schema["$defs"]["RewardConfig"]["properties"]["functions"]
    functions["items"] = {"anyOf": [{"type": "string"}, functions["items"]]}  # a name alone is an entry, too
    return schema
