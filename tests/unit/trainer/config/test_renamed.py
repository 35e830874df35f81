"""Renamed and removed keys are refused in one sentence that says what to do."""

from pathlib import Path

import pytest

from trainer.config.recipe import REFUSED, RENAMED, known_keys, load_config
from trainer.errors import UserError


def test_former_names_are_not_keys_and_present_ones_are() -> None:
    keys = {name for name, _ in known_keys()}
    for old, (new, _) in RENAMED.items():
        assert old not in keys and new in keys
    assert keys.isdisjoint(REFUSED)


@pytest.mark.parametrize("override", [[], ["algorithm.trace=0.9"]])
def test_an_old_key_is_refused_with_its_new_name(tmp_path: Path, override: list[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: m}\ndata: {path: d}\n" + "algorithm: {trace: 0.9}\n" * (not override)
    )
    with pytest.raises(UserError) as caught:
        load_config(recipe, override)
    assert (
        str(caught.value)
        == "algorithm.trace is now algorithm.gae_lambda: write algorithm.gae_lambda: 0.9"
    )


def test_evaluation_data_has_only_one_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {path: d, eval_path: e.jsonl, eval_size: 9}\n")
    with pytest.raises(UserError) as caught:
        load_config(recipe, [])
    assert str(caught.value).splitlines() == [
        'data.eval_path is now eval.datasets.NAME.path: write eval.datasets.NAME.path: "e.jsonl"',
        "data.eval_size is now eval.datasets.NAME.size: write eval.datasets.NAME.size: 9",
    ]


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", -1), ("min_p", 0.05)])
def test_truncated_sampling_is_refused_in_training(tmp_path: Path, key: str, value: float) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{path: m}}\ndata: {{path: d}}\nsampling: {{{key}: {value}}}\n")
    with pytest.raises(UserError) as caught:
        load_config(recipe, [])
    why = "when sampling is truncated the engine's probabilities are not the policy's"
    assert str(caught.value) == f"sampling.{key} is {value}, but {why}: leave it out"
    recipe.write_text("model: {path: m}\ndata: {path: d}\neval: {top_p: 0.9}\n")
    assert load_config(recipe, []).eval.top_p == 0.9


@pytest.mark.parametrize("value", ["data", "longest_first"])
def test_an_order_of_prompts_is_refused(tmp_path: Path, value: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{path: m}}\ndata: {{path: d}}\nrollout: {{order: {value}}}\n")
    with pytest.raises(UserError) as caught:
        load_config(recipe, [])
    why = "engines begin prompts in the order of the data"
    assert str(caught.value) == f"rollout.order is '{value}', but {why}: leave it out"


def test_an_automatic_interval_of_checkpoints_is_refused_with_its_remedy(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {path: d}\ncheckpoint: {every: auto}\n")
    with pytest.raises(UserError) as caught:
        load_config(recipe, [])
    remedy = "should be a number of steps, such as that of half an hour: auto is gone"
    assert str(caught.value) == f"checkpoint.every is 'auto', but {remedy}"
