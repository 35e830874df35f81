"""A key that a recipe takes from the environment is in no file of its run, on no page and on no screen."""

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.rows import write_rows
from trainer.cli import main
from trainer.config.recipe import load_config, to_yaml
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run import checkpoint
from trainer.run.keeper import RunState, find_checkpoint, make_run_tracker, run_identity

KEY, OTHER, LITERAL = "sk-from-the-environment", "sk-rotated-since-then", "sk-stands-in-the-recipe"
RECIPE = """
run: {{name: x, output_dir: {folder}/runs, steps: "${{oc.env:STEPS}}", device: cpu}}
model: {{path: {model}}}
data: {{path: {folder}/data.jsonl, max_prompt_tokens: 16}}
sampling: {{max_tokens: 8}}
engine: {{max_model_len: 64}}
batch: {{prompts_per_step: 2}}
reward: {{functions: [{{name: "{folder}/rewards.py:judged", kwargs: {{key: "${{oc.env:SEARCH_KEY}}"}}}}]}}
rollout:
  client: {{command: [{python}, a.py], env: {{SEARCH_KEY: "${{oc.env:SEARCH_KEY}}", MINE: {literal}}}}}
  kwargs: {{header: "Bearer ${{oc.env:SEARCH_KEY}}", again: "${{rollout.kwargs.header}}"}}
tracking: {{wandb: offline}}
"""


@pytest.fixture
def recipe(tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEARCH_KEY", KEY)
    monkeypatch.setenv("STEPS", "3")
    texts = {"folder": tmp_path, "model": tiny_qwen2, "python": sys.executable, "literal": LITERAL}
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(**texts))
    write_rows(tmp_path / "data.jsonl", [{"prompt": "p", "answer": "a"} for _ in range(4)])
    (tmp_path / "rewards.py").write_text("def judged(completion, *, answer, key): return 1.0\n")
    return tmp_path / "recipe.yaml"


class Weights:
    """The least state that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": {"w": torch.zeros(2)}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def identity(config: TrainConfig) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return run_identity(config, "rows", AutoTokenizer.from_pretrained(config.model.path))


def saved_run(config: TrainConfig) -> Path:
    """Return the folder of a run of one step, written by the real tracker with a real W&B, and a real checkpoint."""
    tracker = make_run_tracker(config, RunState())
    tracker.log(1, {"reward/mean": 1.0})
    tracker.close()
    extra = {"identity": identity(config), "state": {"step": 1}}
    checkpoint.save(config.run.folder / "checkpoints", 1, {"policy": Weights()}, extra)
    return config.run.folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_file_of_a_run_contains_values_of_the_environment(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    config = load_config(recipe, [])
    # The run itself has it
    assert config.rollout.kwargs["again"] == f"Bearer {KEY}" and config.run.steps == 3
    run = saved_run(config)
    assert main(["report", str(run)]) == 0
    assert main(["train", str(recipe), "--dry-run"]) == 0
    output = capsys.readouterr().out
    texts = {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert {"config.yaml", "report.html", "checkpoints/step_1/extra.json"} < texts.keys()
    assert any(re.match(r"wandb/offline-run.*/.*\.wandb", name) for name in texts)
    assert [name for name, text in texts.items() if KEY.encode() in text] == []
    # Which is run again
    assert [name for name, text in texts.items() if LITERAL.encode() in text] == ["config.yaml"]
    assert KEY not in output and LITERAL not in output and "Bearer ***" in output
    assert "Bearer ***" in texts["report.html"].decode()
    for name in ("config.yaml", "checkpoints/step_1/extra.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600


def test_a_runs_recorded_recipe_reads_the_environment_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(recipe, [])
    kept = recipe.with_name("config.yaml")
    kept.write_text(to_yaml(config))
    assert load_config(kept, []) == config
    assert yaml.safe_load(kept.read_text())["run"]["steps"] == 3  # a number is a setting
    monkeypatch.setenv("SEARCH_KEY", OTHER)
    assert load_config(kept, []).rollout.kwargs["again"] == f"Bearer {OTHER}"
    monkeypatch.delenv("SEARCH_KEY")
    with pytest.raises(UserError, match="Environment variable 'SEARCH_KEY' not found"):
        load_config(kept, [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_with_another_key(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_config(recipe, ["tracking.wandb=disabled"])
    saved_run(before)
    monkeypatch.setenv("SEARCH_KEY", OTHER)
    config = load_config(recipe, ["tracking.wandb=disabled"])
    path, state = find_checkpoint(config, identity(config))
    assert path is not None and state.step == 1
    another = load_config(recipe, ["reward.functions.0.weight=2.0"])
    with pytest.raises(UserError, match=r"was trained with reward\.functions") as refused:
        find_checkpoint(another, identity(another))
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "policy.lr=${oc.env:SEARCH_KEY}",
        "rollout.client.workers=${oc.env:SEARCH_KEY}",
        "rollout.client.command=[]",  # the whole section is told of
        "rollout.mcp.files={env: sk-literal}",
        "reward.functions.0={name: x, kwargs: '${oc.env:SEARCH_KEY}'}",
        "engine.extra=${oc.env:SEARCH_KEY}",
    ],
)
def test_errors_contain_no_secrets(recipe: Path, override: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert "sk-" not in str(caught.value)


def test_recorded_recipes_have_settings_of_verifiers_once(recipe: Path) -> None:
    text = yaml.safe_load(recipe.read_text())
    text["rollout"] = {
        "verifiers": {"environment": "e", "python": "p", "env": {"A": "${oc.env:SEARCH_KEY}"}}
    }
    del text["data"]["path"]
    recipe.write_text(yaml.safe_dump(text))
    config = load_config(recipe, [])
    assert KEY in str(config.data.subset)  # what loads the tasks
    assert KEY not in to_yaml(config)
    kept = recipe.with_name("config.yaml")
    kept.write_text(to_yaml(config))
    again = load_config(kept, [])
    assert json.loads(again.data.subset or "")["env"] == {"A": KEY} and again.rollout == config.rollout


def test_interpolations_that_multiply_are_refused_before_they_fill_the_memory(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml.safe_load(recipe.read_text())
    ways: list[list[Any]] = [
        ["lol" * 5, lambda name: f"${{rollout.kwargs.{name}}}" * 10],
        ["", lambda name: f"${{rollout.kwargs.{name}}}" * 10],  # time without end, and no memory
        [["lol"] * 9, lambda name: [f"${{rollout.kwargs.{name}}}"] * 10],
    ]
    for start, tenfold in ways:
        text["rollout"]["kwargs"] = {"s0": start} | {f"s{n}": tenfold(f"s{n - 1}") for n in range(1, 10)}
        recipe.write_text(yaml.safe_dump(text))
        assert main(["train", str(recipe), "--dry-run"]) == 2
        message = capsys.readouterr().err
        assert (
            "interpolations insert more than 1048576 characters" in message and message.count("\n") == 1
        )
    text["rollout"]["kwargs"] = {"long": "x" * 2**21}  # no interpolation
    recipe.write_text(yaml.safe_dump(text))
    assert len(load_config(recipe, []).rollout.kwargs["long"]) == 2**21


def test_a_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    from trainer.run.records import PRIVATE, write_whole

    (tmp_path / "file.tmp").write_text("what a kill has left, with the mode of its day")
    old = os.umask(0)
    try:
        write_whole(tmp_path / "file", "text", PRIVATE)
        write_whole(tmp_path / "file", "text")
        write_whole(tmp_path / "plain", "text")
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "plain")] == [
        0o600,
        0o666,
    ]
