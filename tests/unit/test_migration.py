"""The page for people who come from other trainers names keys that TRL has; test_docs_code.py validates its recipes."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.conftest import ROOT
from trainer.cli import parse
from trainer.config.recipe import known_keys, load_config
from trainer.config.suggestions import TABLE
from trainer.errors import UserError

PAGE = (ROOT / "docs/migration.md").read_text()
ROWS = [line.strip("|").split("|") for line in TABLE.read_text().splitlines()[2:]]
KEYS = [key for key, _ in known_keys()]


def test_every_key_of_trl_exists() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    arguments = set(inspect.signature(GRPOTrainer).parameters)
    for cell in (row[0] for row in ROWS if "launcher" not in row[0] and "variable" not in row[0]):
        for code in re.findall(r"`(\w+)`", cell):
            assert code in (arguments if "argument" in cell else fields | {"prompt"}), code


def test_every_key_in_the_last_column_exists_here() -> None:
    codes = [code for row in ROWS for code in re.findall(r"`(\w+\.[\w.]+)", row[-1])]
    assert len(codes) > 60 and set(codes) <= set(KEYS)


@pytest.mark.parametrize("row", ROWS, ids=[row[-1].strip()[:60] for row in ROWS])
def test_a_key_of_another_trainer_is_answered_by_its_row(row: list[str], tmp_path: Path) -> None:
    """Set each key on the left in a recipe, by an override; as an option, where it is one of OpenRLHF."""
    *foreign, ours = row
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    for key in re.findall(r"`-*([\w.]+)", " ".join(foreign)):
        if key in KEYS:  # of the same name, or a section of ours
            continue
        with pytest.raises(UserError) as refused:
            load_config(recipe, [f"{key}=1"])
        (line,) = [
            line
            for line in str(refused.value).splitlines()
            if line.startswith(f"{key} is not a known key; ")
        ]
        assert ours.strip().replace("`", "") in line
        if "." not in key:
            with pytest.raises(UserError) as refused:
                parse(["train", str(recipe), f"--{key}", "1"])
            assert ours.strip().replace("`", "") in str(refused.value)


def test_the_script_sets_keys_that_trl_has() -> None:
    (script,) = re.findall(r"GRPOConfig\(\n(.*?)^\)", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^    (\w+)=", script, re.MULTILINE)) <= {
        f.name for f in dataclasses.fields(GRPOConfig)
    }
