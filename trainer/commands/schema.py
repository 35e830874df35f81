"""`hotbunk schema`: print the JSON Schema by which editors complete and explain recipes' keys."""

import argparse
import json
import re
from typing import Any

from generation.yaml_files import INCLUDES
from trainer.config.schema import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set the command's description; the command has no arguments."""
    parser.description = (
        "Print a JSON Schema of recipes. Save it to a file and name the file in a recipe's first "
        "line, for editors with the YAML language server: # yaml-language-server: $schema=FILE"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(recipe_schema(), indent=1))
    return 0


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe's file: the sections, and `includes`, which only files have."""
    schema = TrainConfig.model_json_schema()
    includes = {
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "files that join this section",
    }
    for section in (schema, *schema["$defs"].values()):
        section.get("properties", {})[INCLUDES] = includes
        section.pop("required", None)  # an included file may have the keys that are missing here
        if meaning := section.get("description"):
            section["description"] = re.sub(r"(?<!\n)\n(?!\n)", " ", meaning)
    functions = schema["$defs"]["RewardConfig"]["properties"]["functions"]
    # A name alone is an entry, too
    functions["items"] = {"anyOf": [{"type": "string"}, functions["items"]]}
    return schema
