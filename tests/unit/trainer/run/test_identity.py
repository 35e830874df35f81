"""A run goes on from a checkpoint of its own data, model and algorithm, or says in one sentence what differs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT, TinyModel
from tests.support.recipes import make_config
from trainer.config.resuming import IDENTITY_DIGESTS, IDENTITY_KEYS, IDENTITY_SECTIONS
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.run import checkpoint
from trainer.run.keeper import RunState, check_identity, find_checkpoint, model_digest, run_identity


def recipe(model: Path, **sections: dict[str, Any]) -> TrainConfig:
    reward = {"functions": [{"name": "exact_match"}]}
    return make_config({"model": {"path": str(model)}, "reward": reward}, **sections)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model()


def refusal(
    model: Path, allowed: list[str], fingerprint: str = "rows", **sections: dict[str, Any]
) -> str:
    """Return the error when a run of plain settings and data "rows" is resumed with other ones; "" if none."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    saved = {"identity": json.loads(json.dumps(run_identity(recipe(model), "rows", tokenizer)))}
    current = run_identity(recipe(model, **sections), fingerprint, tokenizer)
    try:
        check_identity(Path("runs/x/checkpoints/step_4"), saved, current, allowed)
    except UserError as error:
        return str(error)
    return ""


def test_the_same_run_goes_on_whatever_machine_and_length_it_has(model: Path) -> None:
    assert refusal(model, []) == ""
    batch = {"tokens_per_micro_batch": 77}
    policy = {"lr": 1.0, "backend": "deepspeed"}
    assert (
        refusal(model, [], batch=batch, policy=policy, run={"steps": 7, "name": "y"}, eval={"every": 3})
        == ""
    )


@pytest.mark.parametrize(
    ("sections", "difference"),
    [
        ({"algorithm": {"clip_high": 0.5}}, "algorithm.clip_high = 0.28 (now 0.5)"),
        (
            {"algorithm": {"group_size": 3, "kl_coef": 0.1}},
            "algorithm.group_size = 8 (now 3), algorithm.kl_coef = 0.0 (now",
        ),
        ({"batch": {"prompts_per_step": 3}}, "batch.prompts_per_step = 32 (now 3)"),
        ({"run": {"seed": 3}}, "run.seed = 0 (now 3)"),
        ({"sampling": {"stop_token_ids": [7]}}, "sampling.stop_token_ids = null (now [7])"),
        (
            {"reward": {"functions": [{"name": "numeric_match"}]}},
            'reward.functions = [{"name": "exact_match",',
        ),
    ],
)
def test_another_algorithm_is_refused_unless_permitted(
    model: Path, sections: dict[str, Any], difference: str
) -> None:
    sentence = refusal(model, [], **sections)
    assert f"step_4 was trained with {difference}" in sentence and "\n" not in sentence
    section = next(iter(sections))
    keys = [f"{section}.{key}" for key in sections[section]]
    assert (
        f"permit it by checkpoint.resume_anyway=[{','.join(keys)}], or start over with another run.name"
        in sentence
    )
    assert refusal(model, [section], **sections) == refusal(model, keys, **sections) == ""
    assert refusal(model, ["data", "model"], **sections) == sentence


def test_other_data_are_refused_unless_permitted(model: Path) -> None:
    assert 'was trained with data = "rows" (now "others"): restore' in refusal(
        model, [], fingerprint="others"
    )
    assert refusal(model, ["data"], fingerprint="others") == ""


def test_a_model_is_known_by_its_configuration_and_its_weights(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(dict(reversed(config.items())) | {"transformers_version": "99"})
    )
    assert model_digest(copy) == model_digest(model)

    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert model_digest(copy) != model_digest(model)

    (copy / "config.json").write_text(json.dumps(config))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert model_digest(copy) != model_digest(model)


def test_another_vocabulary_is_another_run(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    before = run_identity(recipe(model), "rows", tokenizer)
    tokenizer.add_tokens(["<|another|>"])
    assert {
        key
        for key, value in run_identity(recipe(model), "rows", tokenizer).items()
        if value != before[key]
    } == {"tokenizer"}


def test_a_checkpoint_of_an_older_version_is_refused(model: Path) -> None:
    with pytest.raises(
        UserError, match="step_4 does not say which data, model and algorithm .* checkpoint.resume=none$"
    ):
        check_identity(Path("step_4"), {"state": {}}, {"data": "rows"}, [])


def test_a_key_that_a_checkpoint_does_not_know_counts_as_its_default(model: Path) -> None:
    current = run_identity(recipe(model), "rows", AutoTokenizer.from_pretrained(model))
    saved = {key: value for key, value in current.items() if key != "algorithm.dual_clip"}
    check_identity(Path("step_4"), {"identity": saved}, current, [])
    with pytest.raises(UserError, match=r"with algorithm.dual_clip = null \(now 3.0\): restore"):
        check_identity(Path("step_4"), {"identity": saved}, current | {"algorithm.dual_clip": 3.0}, [])
    with pytest.raises(UserError, match=r'data = unknown \(now "rows"\), model = unknown'):
        check_identity(Path("step_4"), {"identity": {}}, current, [])


@pytest.mark.parametrize(("data", "prompts"), [("rows", 4), ("others", 0)])
def test_other_data_begin_at_their_first_prompt(tmp_path: Path, data: str, prompts: int) -> None:
    """The state has a field of an earlier version, which is passed over."""
    run = {"output_dir": str(tmp_path), "name": "run"}
    config = make_config(run=run, checkpoint={"resume_anyway": ["data"]})
    state = {"step": 1, "prompts": 4, "lengths": {"3": 17}}
    checkpoint.save(
        config.run.folder / "checkpoints", 1, {}, {"state": state, "identity": {"data": "rows"}}
    )
    _, resumed = find_checkpoint(config, {"data": data})
    assert resumed == RunState(step=1, prompts=prompts)


def test_the_page_names_every_key_that_a_resume_compares() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    section = page.partition("## What is refused")[2].partition("## ")[0]
    assert [key for key in IDENTITY_KEYS if f"`{key}`" not in section] == []
    assert all(f"`{key}`" in section for key in (*IDENTITY_DIGESTS, *IDENTITY_SECTIONS))
