"""The page for people who come from other trainers names keys that TRL has; test_docs_code.py validates its recipes."""

import dataclasses
import inspect
import re

from trl import GRPOConfig, GRPOTrainer

from tests.conftest import ROOT

PAGE = (ROOT / "docs/migration.md").read_text()
ROWS = [
    line.split(" | ") for line in PAGE.partition("## Keys")[2].partition("## ")[0].splitlines() if line.count("|") > 4
]


def test_every_key_of_trl_exists() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    arguments = set(inspect.signature(GRPOTrainer).parameters)
    for cell in (row[0] for row in ROWS[2:]):
        for code in re.findall(r"`(\w+)(?::[^`]*)?`", cell):
            assert code in (arguments if "argument" in cell or code == "reward_funcs" else fields | {"prompt"}), code


def test_the_script_sets_keys_that_trl_has() -> None:
    (script,) = re.findall(r"GRPOConfig\(\n(.*?)^\)", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^    (\w+)=", script, re.MULTILINE)) <= {f.name for f in dataclasses.fields(GRPOConfig)}
