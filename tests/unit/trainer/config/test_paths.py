"""`~` and variables in the keys of a recipe that are paths, and in arguments of commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.cli import parse, training_config
from trainer.config.recipe import load_config, to_yaml
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run.keeper import _compared_keys

RECIPE = "model: {path: m}\ndata: {path: d}\n"
KEYS = (
    "run.output_dir",
    "model.path",
    "model.tokenizer",
    "data.path",
    "eval.datasets.a.path",
    "critic.path",
    "algorithm.teacher",
    "checkpoint.resume",
)
WORDS = ("rollout.client.command", "rollout.mcp.a.command")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    monkeypatch.delenv("GONE", raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def value(config: Any, key: str) -> Any:
    """Return the value of a dotted key, in sections and mappings."""
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize("key", KEYS)
def test_every_path_is_expanded_and_recorded_as_written(recipe: Path, key: str) -> None:
    home, place = f"{recipe.parent}/home", f"{recipe.parent}/place"
    cases = {
        "~": home,
        "~/x": f"{home}/x",
        "$PLACE/x": f"{place}/x",
        "a/$PLACE": f"a/{place}",
        "/$5~": "/$5~",
    }
    for written, meant in cases.items():
        config = load_config(recipe, [f"{key}={json.dumps(written)}"])
        assert value(config, key) == meant
        assert value(config.recorded(), key) == written
    config = load_config(recipe, [f"{key}=${{PLACE}}/x"])
    assert value(config, key) == f"{place}/x"
    assert value(config.recorded(), key) == "${oc.env:PLACE}/x"
    for unset in ("$GONE/x", "${GONE}/x"):
        with pytest.raises(UserError) as caught:
            load_config(recipe, [f"{key}={unset}"])
        assert key in str(caught.value) and "GONE" in str(caught.value)


@pytest.mark.parametrize("key", WORDS)
def test_words_of_commands_are_expanded_unless_a_shell_reads_them(recipe: Path, key: str) -> None:
    script = "for i in 1 2; do echo $i; done"
    config = load_config(recipe, [f"{key}=[~/venv/bin/python, $PLACE/a.py, -c, {script!r}]"])
    place = recipe.parent / "place"
    assert value(config, key) == [f"{recipe.parent}/home/venv/bin/python", f"{place}/a.py", "-c", script]


def test_names_that_are_not_paths_stay_as_they_are(recipe: Path) -> None:
    for name in (
        "Qwen/Qwen3-8B",
        "reasoning_gym:basic_arithmetic?size=10",
        "./data.jsonl",
        "a~b",
        "cost$.jsonl",
    ):
        assert load_config(recipe, [f"data.path={name}"]).data.path == name
    prompt = "It costs $PLACE, or ~."
    assert load_config(recipe, [f"data.system_prompt={prompt!r}"]).data.system_prompt == prompt


def test_a_runs_files_suit_another_home(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "{name: ~/mine/reward.py:f}"
    overrides = ["run.output_dir=~/runs", "model.path=~/model", f"reward.functions=[{function}]"]
    config = load_config(recipe, overrides)
    identity = _compared_keys(config.recorded())
    copy = recipe.with_name("config.yaml")
    copy.write_text(to_yaml(config))
    assert str(recipe.parent) not in copy.read_text()
    monkeypatch.setenv("HOME", "/elsewhere")
    again = load_config(copy, [])
    assert (again.model.path, again.run.folder) == ("/elsewhere/model", Path("/elsewhere/runs/recipe"))
    assert _compared_keys(again.recorded()) == identity


def test_paths_given_in_python_are_expanded_too(recipe: Path) -> None:
    values = yaml.safe_load(RECIPE) | {"run": {"output_dir": Path("~/runs"), "name": "x"}}
    assert TrainConfig.model_validate(values).run.folder == recipe.parent / "home/runs/x"


def test_included_files_and_accelerates_file_are_found(recipe: Path) -> None:
    (recipe.parent / "home").mkdir()
    (recipe.parent / "home/base.yaml").write_text("run: {steps: 7}\n")
    (recipe.parent / "home/accelerate.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\n"
    )
    recipe.write_text(
        f"includes: [~/base.yaml]\n{RECIPE}policy: {{accelerate_config: $HOME/accelerate.yaml}}\n"
    )
    config = load_config(recipe, [])
    assert (config.run.steps, config.policy.backend, config.policy.dtype) == (7, "fsdp", "bfloat16")
    recipe.write_text(f"includes: [$GONE/base.yaml]\n{RECIPE}")
    with pytest.raises(UserError, match=r"includes: \$GONE is not set in the environment"):
        load_config(recipe, [])


def test_arguments_of_commands_are_expanded(recipe: Path) -> None:
    home = recipe.parent / "home"
    home.mkdir()
    assert parse(["report", "~/runs/a", "$HOME/runs/b"]).runs == [home / "runs/a", home / "runs/b"]
    assert parse(["eval", "~/model", "~/r.yaml", "--output", "$HOME/o"]).output == home / "o"
    assert parse(["generate", "$HOME/model"]).model == f"{home}/model"
    assert parse(["serve", "Qwen/Qwen3-8B"]).model == "Qwen/Qwen3-8B"
    (home / "r.yaml").write_text(RECIPE)
    assert training_config(parse(["train", "~/r.yaml", "--model.path", "~/m"])).model.path == f"{home}/m"
    with pytest.raises(UserError, match=r"argument RUN: \$GONE is not set in the environment"):
        parse(["report", "$GONE/run"])
