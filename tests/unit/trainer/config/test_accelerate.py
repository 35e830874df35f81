"""An Accelerate file as the policy's keys: those that TRL ships, and each key that has no counterpart."""

import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config.accelerate import policy_keys
from trainer.config.recipe import load_config
from trainer.config.schema import PolicyConfig
from trainer.errors import UserError

FOUND = find_spec("trl")
SHIPPED = Path(FOUND.origin or "").parent / "accelerate_configs" if FOUND else Path()
FSDP = {
    "backend": "fsdp",
    "reshard_after_forward": True,
    "activation_checkpointing": "none",
    "update_on": "device",
}
WANTED: dict[str, dict[str, Any]] = {
    "fsdp1": FSDP,
    "fsdp2": FSDP,
    "multi_gpu": {"backend": "fsdp"},
    "single_gpu": {"backend": "fsdp"},
    "zero1": {"backend": "deepspeed", "zero_stage": 1, "update_on": "device"},
    "zero2": {"backend": "deepspeed", "zero_stage": 2, "update_on": "device"},
    "zero3": {"backend": "deepspeed", "zero_stage": 3, "update_on": "device"},
}


@pytest.mark.skipif(FOUND is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", WANTED)
def test_every_file_that_trl_ships_is_understood(name: str) -> None:
    keys = policy_keys(SHIPPED / f"{name}.yaml")
    assert keys == WANTED[name] | {"dtype": "bfloat16"}
    PolicyConfig.model_validate(keys)


@pytest.mark.skipif(FOUND is None, reason="TRL is not installed")
def test_every_file_that_trl_ships_is_tested() -> None:
    assert {file.stem for file in SHIPPED.glob("*.yaml")} == set(WANTED)


def written(tmp_path: Path, **keys: Any) -> Path:
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2} | keys))
    return file


def test_keys_of_the_recipe_take_precedence(tmp_path: Path) -> None:
    file = written(tmp_path, mixed_precision="no", fsdp_config={"fsdp_activation_checkpointing": True})
    policy = {"accelerate_config": str(file), "activation_checkpointing": "none"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"path": "d"}, "policy": policy}))
    config = load_config(recipe, [])
    assert (config.policy.dtype, config.policy.activation_checkpointing) == ("float32", "none")
    assert (
        load_config(recipe, ["policy.activation_checkpointing=full"]).policy.activation_checkpointing
        == "full"
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mixed_precision": "fp16"}, "policy.dtype"),
        (
            {"distributed_type": "MEGATRON_LM"},
            "should be one of NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED",
        ),
        ({"distributed_type": None}, "distributed_type: None, which should be one of NO"),
        ({"distributed_type": ["FSDP"]}, "which should be one of NO"),
        ({"fsdp_config": {"fsdp_reshard_after_forward": {}}}, "which should be a single value"),
        ({"fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD"}}, "policy.shard_size"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "policy.zero_stage"),
        (
            {"deepspeed_config": {}, "distributed_type": "DEEPSPEED", "dynamo_config": {"backend": "x"}},
            "policy.compile",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "nvme"}},
            "policy.update_on",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": 4}},
            "batch.tokens_per_micro_batch",
        ),
        ({"something_new": 3}, "no counterpart here"),
    ],
)
def test_keys_without_counterpart_are_refused_with_the_key_to_use(
    tmp_path: Path, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named) as caught:
        policy_keys(written(tmp_path, **keys))
    (sentence,) = str(caught.value).splitlines()
    assert sentence.startswith("policy.accelerate_config: ") and len(sentence) - len(str(tmp_path)) < 300


def test_offloaded_parameters_are_updated_on_the_host(tmp_path: Path) -> None:
    for offloaded, home in ((True, "host"), (False, "device")):
        assert (
            policy_keys(written(tmp_path, fsdp_config={"fsdp_offload_params": offloaded}))["update_on"]
            == home
        )


def test_clipping_is_translated_and_another_kinds_section_is_left_out(tmp_path: Path) -> None:
    deepspeed = {"zero_stage": 2, "gradient_clipping": 0.5, "gradient_accumulation_steps": "auto"}
    kind = {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    keys = policy_keys(written(tmp_path, **kind, fsdp_config={"fsdp_offload_params": True}))
    assert keys == {"backend": "deepspeed", "zero_stage": 2, "update_on": "device", "max_grad_norm": 0.5}


@pytest.mark.parametrize(
    ("version", "section", "reshard"),
    [
        (1, {"fsdp_sharding_strategy": 2}, False),  # by its number
        (1, {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, False),
        (2, {"fsdp_reshard_after_forward": "no"}, False),
        (1, {}, True),
        (2, {}, True),
    ],
)
def test_values_are_spelled_and_left_out_as_accelerate_allows(
    tmp_path: Path, version: int, section: dict[str, Any], reshard: bool
) -> None:
    keys = policy_keys(written(tmp_path, fsdp_config={"fsdp_version": version} | section))
    assert keys["reshard_after_forward"] is reshard


def test_a_refusal_by_accelerate_is_one_sentence(tmp_path: Path) -> None:
    file = written(tmp_path, fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": "perhaps"})
    with pytest.raises(UserError, match=r"^policy.accelerate_config: .* invalid truth value perhaps$"):
        policy_keys(file)


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "\x00"])
def test_a_file_that_accelerate_did_not_write_is_refused_in_one_sentence(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match="policy.accelerate_config: ") as caught:
        policy_keys(tmp_path / "x.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="absent.yaml is not a file: name one"):
        policy_keys(tmp_path / "absent.yaml")


def test_files_without_end_are_refused(tmp_path: Path) -> None:
    """Ten lines of aliases are 9^9 values, a pipe has no end, and Python's stack is too short for 5,000 brackets."""
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for earlier, later in pairwise("abcdefghij"):
        lines.append(f"{later}: &{later} [{', '.join(['*' + earlier] * 9)}]")
    (tmp_path / "aliases.yaml").write_text("\n".join(lines))
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    os.mkfifo(tmp_path / "pipe.yaml")
    recipe = tmp_path / "recipe.yaml"
    for name, sentence in (
        ("aliases", "expansion exceeds the configured limit"),
        ("deep", "nested too deep"),
        ("pipe", "is not a file"),
    ):
        with pytest.raises(UserError, match=f"policy.accelerate_config: .*{name}.yaml.*{sentence}"):
            policy_keys(tmp_path / f"{name}.yaml")
        with pytest.raises(UserError, match=f"{name}.yaml.*{sentence}"):
            load_config(tmp_path / f"{name}.yaml", [])
    recipe.write_text(yaml.safe_dump({"model": {"path": "m"}, "policy": {"accelerate_config": ""}}))
    with pytest.raises(
        UserError, match="policy.accelerate_config is '', but should have at least 1 character"
    ):
        load_config(recipe, [])
