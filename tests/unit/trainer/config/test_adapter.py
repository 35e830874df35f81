"""`lora.start`: what a recipe takes from a PEFT adapter, and which adapters are refused before anything loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.lora_checks import peft_adapter
from tests.support.real_run import write_recipe
from trainer.commands.eval import evaluation_config
from trainer.config.checks import find_problems
from trainer.config.recipe import load_config, to_yaml
from trainer.errors import UserError
from trainer.model_checks import check_model
from trainer.policy import lora
from trainer.run.keeper import _compared_keys

WEIGHTS = "adapter_model.safetensors"
PLAIN = "go on from a plain LoRA adapter, or merge this one into its model with PEFT"


@pytest.fixture
def adapter(tmp_path: Path, tiny_qwen2: Path) -> Path:
    """Return an adapter of rank 5 and alpha 8 at two kinds of layers."""
    peft_adapter(tiny_qwen2, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def recipe(tmp_path: Path, tiny_qwen2: Path) -> Path:
    return write_recipe(
        tmp_path, tiny_qwen2, run={"output_dir": str(tmp_path / "runs"), "device": "cpu"}
    )


def problems(recipe: Path, adapter: Path, *overrides: str) -> list[str]:
    return find_problems(load_config(recipe, [f"lora.start={adapter}", *overrides]), "train", {})


def test_rank_alpha_and_layers_come_from_the_adapter(
    recipe: Path, adapter: Path, tiny_qwen2: Path
) -> None:
    config = load_config(recipe, [f"lora.start={adapter}"])
    assert (config.lora.rank, config.lora.alpha, config.lora.use_rslora) == (5, 8, False)
    assert config.lora.target_modules == ["down_proj", "q_proj"]
    assert find_problems(config, "train", {}) == [] == find_problems(config, "sft", {})
    check_model(config)
    peft_adapter(tiny_qwen2, adapter, use_rslora=True, target_modules=r".*\.(k_proj|up_proj)", r=2)
    config = load_config(recipe, [f"lora.start={adapter}"])
    assert (config.lora.rank, config.lora.use_rslora, config.lora.target_modules) == (
        2,
        True,
        ["k_proj", "up_proj"],
    )
    check_model(config)


def test_keys_that_differ_from_the_adapters_are_refused_with_both_values(
    recipe: Path, adapter: Path
) -> None:
    same = (
        "lora.rank=5",
        "lora.alpha=8",
        "lora.use_rslora=false",
        "lora.target_modules=[q_proj,down_proj]",
    )
    assert problems(recipe, adapter, *same) == []
    check_model(load_config(recipe, [f"lora.start={adapter}", *same]))
    for override, theirs in {
        "lora.rank=6": 5,
        "lora.alpha=16": 8,
        "lora.use_rslora=true": False,
    }.items():
        key, _, ours = override.partition("=")
        (sentence,) = problems(recipe, adapter, override)
        ours = ours.capitalize() if ours == "true" else ours
        assert (
            sentence == f"{key} is {ours}, but the adapter in lora.start has {theirs}: leave {key} out"
        )
    with pytest.raises(UserError) as caught:
        check_model(load_config(recipe, [f"lora.start={adapter}", "lora.target_modules=[q_proj]"]))
    assert "adapters are at ['q_proj'], but those in lora.start at ['down_proj', 'q_proj']" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("loftq_config", {"loftq_bits": 4}),
        ("use_qalora", True),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.w"]),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(
    recipe: Path, adapter: Path, key: str, value: Any
) -> None:
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert problems(recipe, adapter) == []
    file.write_text(json.dumps(settings | {key: value}))
    assert problems(recipe, adapter) == [
        f"lora.start: {adapter} has {key}: {value}, which is not supported: {PLAIN}"
    ]


def test_other_types_of_peft_are_refused(recipe: Path, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3"}))
    assert problems(recipe, adapter) == [
        f"lora.start: {adapter} is of PEFT's type IA3, not LORA: {PLAIN}"
    ]


def test_folders_that_are_not_adapters_are_named(recipe: Path, adapter: Path, tiny_qwen2: Path) -> None:
    def sentence(folder: Path = adapter) -> str:
        (only,) = problems(recipe, folder)
        return only

    assert sentence(tiny_qwen2).startswith(f"lora.start: {tiny_qwen2} is not the folder of an adapter")
    assert "has no adapter_config.json: name one" in sentence(Path("gone"))
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:-8])
    assert f"lora.start: {adapter}/{WEIGHTS} has" in sentence() and "it is cut" in sentence()
    (adapter / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    assert f"lora.start: {adapter}/{WEIGHTS} is a pointer of Git LFS" in sentence()
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    assert f"lora.start: {adapter} has no {WEIGHTS}: save the adapter with PEFT" in sentence()
    (adapter / "adapter_config.json").write_text("{")
    assert f"lora.start: {adapter}/adapter_config.json cannot be read" in sentence()


def test_tensors_of_another_model_are_named(recipe: Path, adapter: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    stored = load_file(adapter / WEIGHTS)
    config = load_config(recipe, [f"lora.start={adapter}"])
    cases = {
        "no such tensor": {key: tensor for key, tensor in stored.items() if key != name},
        "shape [4, 128]": stored | {name: stored[name][:4].clone()},
    }
    for has, tensors in cases.items():
        save_file(tensors, adapter / WEIGHTS)
        with pytest.raises(UserError) as caught:
            check_model(config)
        needs = f"{name}: {adapter} has {has}, and Qwen2ForCausalLM shape {list(stored[name].shape)}: go on from"
        assert f"lora.start: {needs}" in str(caught.value)


def test_another_base_is_named_in_a_line(
    recipe: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(recipe, [f"lora.start={adapter}"])
    check_model(config)
    assert "was trained on" not in capsys.readouterr().err
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "org/other"}))
    check_model(config)
    line = f"lora.start: the adapter in {adapter} was trained on org/other, and goes on with {config.model.path}"
    assert line in capsys.readouterr().err


def test_a_runs_start_belongs_to_its_identity_and_not_to_evaluation(recipe: Path, adapter: Path) -> None:
    config = load_config(recipe, [f"lora.start={adapter}"])
    assert _compared_keys(config.recorded())["lora.start"] == str(adapter)
    folder = config.run.folder
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "config.yaml").write_text(to_yaml(config))
    (adapter / "adapter_config.json").unlink()
    again = evaluation_config(str(folder), None, [])
    assert (again.lora.rank, again.lora.start) == (0, None)


def test_first_values_are_those_of_the_file_in_float32(recipe: Path, adapter: Path) -> None:
    stored = load_file(adapter / WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, adapter / WEIGHTS)
    value = lora.first_values(load_config(recipe, [f"lora.start={adapter}"]).lora)
    for name, tensor in stored.items():
        ours = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        first = value(ours, tensor.shape)
        assert (
            first is not None
            and first.dtype == torch.float32
            and torch.equal(first, tensor.bfloat16().float())
        )
    assert value("model.norm.weight", torch.Size([64])) is None
