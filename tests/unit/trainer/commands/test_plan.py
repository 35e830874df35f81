"""`hotbunk plan`: its arithmetic by hand, its sizes against the model's and vLLM's own, what it refuses."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.conftest import ROOT
from tests.support import largest_models
from tests.support.recipes import make_config
from tests.support.refusals import refusal
from tests.support.released_models import write_weights
from trainer.cli import main
from trainer.commands.plan import batch_lines
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.estimates.kv_cache import kv_token_bytes
from trainer.estimates.memory import (
    MemoryPart,
    activation_bytes,
    attention_elements,
    engine_parts,
    over_budget,
    staging_bytes,
    trainer_parts,
)
from trainer.estimates.model_sizes import ModelSizes, answers_per_update, model_sizes, shard
from trainer.model_checks import check_budget

GIB = 2**30


def recipe(model: Path, **sections: Any) -> TrainConfig:
    base = {
        "run": {"device": "cpu", "steps": 10},
        "model": {"path": str(model)},
        "data": {"path": str(model / "config.json"), "max_prompt_tokens": 100},
        "sampling": {"max_tokens": 100},
        "policy": {"dtype": "float32"},
        "batch": {"prompts_per_step": 12, "tokens_per_micro_batch": 1000, "updates_per_step": 3},
        "algorithm": {"group_size": 4},
        "reward": {"functions": [{"name": "exact_match"}]},
    }
    return make_config(base, **sections)


def by_name(parts: list[MemoryPart]) -> dict[str, tuple[float, float]]:
    return {part.name: (part.generating, part.training) for part in parts}


def test_the_plan_counts_images_added_in_rollouts_and_copies_of_the_server(tiny_qwen2: Path) -> None:
    """Two engines have 24 of 48 answers each, with one request per answer; four ranks train on 12 answers each."""
    sections: dict[str, Any] = {"data": {"max_images": 2, "path": "d", "max_prompt_tokens": 100}}
    assert "images added in rollouts" not in dict(batch_lines(recipe(tiny_qwen2, **sections), 4))
    client = {"client": "a.b:c", "max_image_mib": 64}
    config = recipe(tiny_qwen2, **sections, rollout=client, engine={"tensor_parallel_size": 2})
    assert dict(batch_lines(config, 4))["images added in rollouts"] == (
        "at most 1.50 GiB of an engine's episodes, 4.50 of requests to its server, in base64, and 0.75 of a rank that "
        "trains"
    )
    tools = recipe(tiny_qwen2, **sections, rollout={"tools": ["a.b:c"], "max_image_mib": 64})
    assert ", 0.00 of requests" in dict(batch_lines(tools, 4))["images added in rollouts"]


def test_the_plan_shows_a_steps_arithmetic(tiny_qwen2: Path) -> None:
    config = recipe(tiny_qwen2, engine={"tensor_parallel_size": 2}, algorithm={"num_iterations": 2})
    assert dict(batch_lines(config, 4)) == {
        "ranks": "4, on cpu",
        "engines": "2 of 2 rank(s)",
        "answers a step": "12 prompts x 4 = 48",
        "answers an engine": "24, 256 at a time",
        "tokens a step": "at most 9,600, prompts included",
        "updates": "6 a step, 60 in 10 steps",
        "answers an update and rank": "4, in at most 1 micro-batch(es)",
    }
    # Of 3, 3, 3 and 4 prompts
    config = recipe(tiny_qwen2, batch={"prompts_per_step": 13, "updates_per_step": 4})
    assert answers_per_update(config, 2) == 4 * 4 / 2
    shared = recipe(tiny_qwen2, policy={"sequence_parallel": 2}, batch={"tokens_per_micro_batch": 500})
    assert answers_per_update(shared, 4) == 16 / 2
    lines = dict(batch_lines(shared, 4))
    assert lines["answers an update and 2 ranks that share them"] == "8, in at most 4 micro-batch(es)"


def test_ranks_that_share_sequences_have_a_part_of_the_activations(tiny_qwen2: Path) -> None:
    """The memory of each rank is compared with a measurement in test_simulated_ranks.py."""
    configs = [
        recipe(tiny_qwen2, policy={"sequence_parallel": n, "activation_checkpointing": "full"})
        for n in (1, 2)
    ]
    sizes = model_sizes(configs[0], configs[0].model.path)
    alone, shared = (
        by_name(trainer_parts(config, sizes, 2, 80.0))["activations"][1] for config in configs
    )
    assert 0.5 * alone <= shared < 0.65 * alone


def test_a_rank_gathers_a_part_of_split_experts(tiny_moe: Path) -> None:
    """All of the next layer's are left out, and half of this layer's. scripts/bench/experts.py --split measures it."""
    policy = {"activation_checkpointing": "full"}
    configs = [recipe(tiny_moe, policy=policy | {"expert_parallel": n}) for n in (1, 2)]
    sizes = model_sizes(configs[0], configs[0].model.path)
    experts = sum(
        shape.numel() for name, shape in sizes.shapes.items() if ".layers.0.mlp.experts." in name
    )
    assert experts > 0
    parts = [{part.name: part for part in trainer_parts(config, sizes, 4, 80.0)} for config in configs]
    assert all("last layer" in part["gathered weights"].remark for part in parts)
    whole, split = (part["gathered weights"].training for part in parts)
    width = 4 if configs[0].policy.dtype == "float32" else 2
    assert whole - split == width * (experts + experts / 2)


def test_counted_logits_are_at_most_those_of_a_micro_batch(tiny_qwen2: Path) -> None:
    """A device of 80 GiB would take larger blocks. Beside the logits are the head's gradient, its sum for the columns
    of a block, and the gradient of hidden states twice: as it is summed, and as it is returned.
    """
    config = recipe(tiny_qwen2, run={"device": "cuda"})
    sizes = model_sizes(config, config.model.path)
    targets = 500  # of 1000 tokens, the others being prompts
    vocabulary, hidden = sizes.config["vocab_size"], sizes.config["hidden_size"]
    logits = 4 * (3 * targets * vocabulary + sizes.head + vocabulary * hidden + 2 * targets * hidden)
    assert by_name(trainer_parts(config, sizes, 1, 80.0))["logits"][1] == logits


def test_the_plan_shows_the_host_memory_of_routes(tiny_moe: Path) -> None:
    """Two layers of two experts take 4 bytes a token; an engine's rank holds and packs them, every rank receives and
    batches them.
    """
    config = recipe(tiny_moe, sampling={"max_tokens": 2**20 - 100})
    routed = config.model_copy(update={"model": config.model.model_copy(update={"routes": "engine"})})
    lines = dict(batch_lines(routed, 2))
    assert (
        lines["routes"]
        == f"at most {48 * 4 * 2**20 * 2 / GIB:.2f} GiB of a rank's host memory, 0.19 a step"
    )
    assert "routes" not in dict(batch_lines(config, 2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_sizes_are_those_of_the_model(tiny_qwen2_untied: Path, ranks: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2_untied)
    parameter_count = sum(p.numel() for p in model.parameters())
    part = sum(torch.chunk(p, ranks)[0].numel() for p in model.parameters())
    config = recipe(tiny_qwen2_untied, algorithm={"kl_coef": 0.1})
    sizes = model_sizes(config, config.model.path)
    parts = by_name(trainer_parts(config, sizes, ranks, 80.0))
    assert sizes.total == parameter_count
    assert parts["policy: float32 weights"] == (4 * part, 4 * part)
    assert parts["policy: optimizer state"] == (8 * part, 8 * part)
    assert parts["policy: gradients"] == (0, 4 * part)
    assert parts["reference: weights"] == (4 * part, 4 * part)
    assert sizes.rest + 2 * sizes.layer == parameter_count


def test_a_tied_head_counts_once_and_a_critic_has_one_output(tiny_qwen2: Path) -> None:
    config = recipe(tiny_qwen2, algorithm={"preset": "ppo"})
    sizes = model_sizes(config, config.model.path)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    assert sizes.total == sum(p.numel() for p in model.parameters())
    critic = sum(p.numel() for p in model.base_model.parameters()) + model.config.hidden_size
    assert by_name(trainer_parts(config, sizes, 1, 80.0))["critic: float32 weights"] == (
        4 * critic,
        4 * critic,
    )


def test_only_adapters_of_a_model_are_trained_in_the_plan(tiny_qwen2: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    config = recipe(tiny_qwen2, lora=lora, algorithm={"kl_coef": 0.1}, policy={"dtype": "bfloat16"})
    sizes = model_sizes(config, config.model.path, config.lora)
    parts = by_name(trainer_parts(config, sizes, 1, 80.0))
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    parameter_count = sum(p.numel() for p in model.parameters())
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=lora["target_modules"]))
    trained = peft.get_nb_trainable_parameters()[0]
    assert parts["policy: weights to compute with"] == (2 * parameter_count, 2 * parameter_count)
    assert parts["policy: float32 weights"] == (4 * trained, 4 * trained)
    assert parts["policy: gradients"] == (0, 4 * trained)
    assert "reference: weights" not in parts  # the base is its own
    merged = recipe(tiny_qwen2, lora=lora | {"sync": "merged"}, policy={"dtype": "bfloat16"})
    assert staging_bytes(config, sizes, 1, cut=False) < staging_bytes(merged, sizes, 1, cut=False)


def test_staging_is_two_buckets_but_for_the_first_time(
    tiny_qwen2: Path,
) -> None:
    shapes = {name: torch.Size([152_064, 3584]) for name in ("embedding", "head")}
    sizes = ModelSizes(config={}, shapes=shapes, layer=0, rest=0)
    packed = recipe(tiny_qwen2, policy={"dtype": "bfloat16"})
    gpu = recipe(tiny_qwen2, policy={"dtype": "bfloat16"}, run={"device": "cuda"})
    off = recipe(
        tiny_qwen2, policy={"dtype": "bfloat16"}, run={"device": "cuda"}, sync={"replay": False}
    )
    bucket, largest = 512 << 20, 152_064 * 3584 * 2
    for ranks in (1, 2, 4):
        assert staging_bytes(gpu, sizes, ranks, cut=True) <= 2 * bucket
        assert staging_bytes(gpu, sizes, ranks, cut=False) == 2 * largest
    experts = {"layers.0.mlp.experts.down_proj": torch.Size([128, 2048, 2000])}
    mixture = ModelSizes(config={}, shapes=shapes | experts, layer=0, rest=0)
    assert staging_bytes(gpu, mixture, 2, cut=True) == 2 * 128 * 2048 * 2000 * 2 < 2 * largest
    plain = recipe(tiny_qwen2, policy={"dtype": "bfloat16"}, engine={"plain_cpu_weights": True})
    assert staging_bytes(plain, mixture, 2, cut=True) <= 2 * bucket
    for config in (packed, off):
        assert staging_bytes(config, sizes, 2, cut=True) == 2 * largest


def test_syncs_without_shared_memory_have_buffers_on_both_sides(tiny_qwen2: Path) -> None:
    shapes = {name: torch.Size([152_064, 3584]) for name in ("embedding", "head")}
    sizes = ModelSizes(config={}, shapes=shapes, layer=0, rest=0)
    staged, broadcast, storage = (
        recipe(
            tiny_qwen2,
            policy={"dtype": "bfloat16"},
            engine={"plain_cpu_weights": True} | place,
            sync={"way": way},
        )
        for place, way in (({}, "staged"), ({"placement": "ranks"}, "auto"), ({}, "storage"))
    )
    in_parts = staging_bytes(staged, sizes, 2, cut=True)
    assert staging_bytes(broadcast, sizes, 2, cut=True) == 2 * in_parts
    delta = broadcast.model_copy(update={"sync": broadcast.sync.model_copy(update={"delta": True})})
    assert staging_bytes(delta, sizes, 2, cut=True) == 3 * in_parts, "and a bucket as it was before"
    assert staging_bytes(storage, sizes, 2, cut=True) == 4 * 152_064 * 3584 * 2 > 2 * in_parts


def test_only_reprocessed_weights_are_staged_if_engines_pull(tiny_qwen2: Path) -> None:
    shapes = {name: torch.Size([152_064, 3584]) for name in ("embedding", "head")}
    experts = {"layers.0.mlp.experts.down_proj": torch.Size([128, 2048, 2000])}
    latent = {"layers.0.self_attn.kv_b_proj.weight": torch.Size([128 * 256, 512 * 125])}
    pulled = recipe(tiny_qwen2, engine={"plain_cpu_weights": True}, sync={"way": "pull"})
    merging = pulled.model_copy(
        update={"lora": pulled.lora.model_copy(update={"rank": 8, "sync": "merged"})}
    )
    for more, later in (({}, 0), (experts, 0), (experts | latent, 2 * 4 * 128 * 256 * 512 * 125)):
        sizes = ModelSizes(config={}, shapes=shapes | more, layer=0, rest=0)
        assert staging_bytes(pulled, sizes, 2, cut=True) == later
        assert staging_bytes(pulled, sizes, 2, cut=False) >= 2 * 4 * 152_064 * 3584
        assert staging_bytes(merging, sizes, 2, cut=True) == later, "factors are read, too"


@pytest.mark.parametrize(
    ("offload", "masters", "moments"),
    [("none", True, True), ("optimizer", True, False), ("all", False, False)],
)
def test_offloaded_memory_on_cuda_is_free_while_answers_are_generated(
    tiny_qwen2: Path, offload: str, masters: bool, moments: bool
) -> None:
    for device, away in (("cuda", True), ("cpu", False)):
        config = recipe(
            tiny_qwen2, run={"device": device}, policy={"offload": offload}, algorithm={"kl_coef": 0.1}
        )
        parts = by_name(trainer_parts(config, model_sizes(config, config.model.path), 1, 80.0))
        assert (parts["policy: float32 weights"][0] > 0) == (masters or not away)
        assert (parts["policy: optimizer state"][0] > 0) == (moments or not away)
        assert (parts["reference: weights"][0] > 0) == (not away)
        assert all(training > 0 for _, training in parts.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_shared_by_trainer_and_engine_count_once(tiny_qwen2: Path, dtype: str) -> None:
    config = recipe(tiny_qwen2, policy={"dtype": dtype}, sync={"way": "zero_copy"})
    sizes = model_sizes(config, config.model.path)
    parts = by_name([*trainer_parts(config, sizes, 1, 80.0), *engine_parts(config, sizes, 1, 1.0)])
    width = {"float32": 4, "bfloat16": 2}[dtype]
    assert parts["engine: weights"] == (width * sizes.total, width * sizes.total)
    masters = 0 if dtype == "float32" else 4 * sizes.total
    assert parts["policy: float32 weights"] == (masters, masters)
    assert "gathered weights" not in parts


def test_a_teacher_replaces_the_reference_model(tiny_qwen2: Path, tiny_qwen2_untied: Path) -> None:
    config = recipe(tiny_qwen2, algorithm={"advantage": "distill", "teacher": str(tiny_qwen2_untied)})
    parts = by_name(trainer_parts(config, model_sizes(config, config.model.path), 1, 80.0))
    teacher = AutoModelForCausalLM.from_pretrained(tiny_qwen2_untied)
    assert parts["teacher: weights"][0] == 4 * sum(p.numel() for p in teacher.parameters())


@pytest.mark.parametrize(
    ("stage", "whole_weights", "whole_gradients"), [(1, True, True), (2, True, False), (3, False, False)]
)
def test_sharding_by_zero_depends_on_its_stage(
    tiny_qwen2: Path, stage: int, whole_weights: bool, whole_gradients: bool
) -> None:
    config = recipe(
        tiny_qwen2, policy={"backend": "deepspeed", "zero_stage": stage, "dtype": "bfloat16"}
    )
    sizes = model_sizes(config, config.model.path)
    parts = by_name(trainer_parts(config, sizes, 4, 80.0))
    total, part = sizes.total, shard(sizes.shapes, 4)
    assert parts["policy: weights to compute with"][0] == 2 * (total if whole_weights else part)
    assert parts["policy: gradients"][1] == 4 * (total if whole_gradients else part)
    assert parts["policy: gradients"][0] == (4 * part if stage == 3 else 0), "ZeRO-3 keeps its buffer"
    policy = {"backend": "deepspeed", "zero_stage": stage, "update_on": "host"}
    away = recipe(tiny_qwen2, policy=policy, run={"device": "cuda"})
    assert by_name(trainer_parts(away, sizes, 4, 80.0))["policy: optimizer state"] == (0, 0)


def test_the_table_of_the_largest_models_is_the_plans() -> None:
    assert largest_models.table() in (ROOT / "docs/memory-and-scale.md").read_text()


def test_inputs_of_recomputed_layers_in_host_memory_are_not_the_devices(tiny_qwen2: Path) -> None:
    kept = {}
    for device, offload in itertools.product(("cuda", "cpu"), (False, True)):
        policy = {"activation_checkpointing": "full", "offload_activations": offload}
        config = recipe(tiny_qwen2, run={"device": device}, policy=policy)
        parts = by_name(trainer_parts(config, model_sizes(config, config.model.path), 1, 80.0))
        kept[device, offload] = parts["activations"][1]
    assert kept["cuda", True] < kept["cuda", False] and kept["cpu", True] == kept["cpu", False]


@pytest.mark.parametrize("keys", [{}, {"lora": {"rank": 4}}, {"sync": {"way": "zero_copy"}}])
def test_a_policy_that_is_updated_on_the_host_keeps_nothing_on_the_device(
    tiny_qwen2: Path, keys: Any
) -> None:
    """Of the engine's weights, which zero_copy shares, `engine_parts` has the bytes."""
    for device, away in (("cuda", True), ("cpu", False)):
        config = recipe(tiny_qwen2, run={"device": device}, policy={"update_on": "host"}, **keys)
        parts = by_name(trainer_parts(config, model_sizes(config, config.model.path), 2, 80.0))
        kept = sum(training for name, (_, training) in parts.items() if name.startswith("policy: "))
        assert (kept == 0) == away


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_takes_as_much_as_vllm_says(tiny_qwen3: Path, ranks: int) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = recipe(tiny_qwen3, engine={"tensor_parallel_size": ranks, "dtype": "bfloat16"})
    sizes = model_sizes(config, config.model.path)
    model = json.loads((tiny_qwen3 / "config.json").read_text())
    page = FullAttentionSpec(
        block_size=16,
        num_kv_heads=model["num_key_value_heads"] // ranks,
        head_size=model["head_dim"],
        dtype=torch.bfloat16,
    )
    assert kv_token_bytes(config, sizes) == model["num_hidden_layers"] * page.page_size_bytes / 16


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_of_latent_attention_takes_one_vector_on_each_rank(tiny_model: Any, ranks: int) -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    model = tiny_model(architecture="deepseek_v2", tied=False)
    config = recipe(model, engine={"tensor_parallel_size": ranks, "dtype": "bfloat16"})
    sizes = model_sizes(config, config.model.path)
    page = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=sizes.config["kv_lora_rank"] + sizes.config["qk_rope_head_dim"],
        dtype=torch.bfloat16,
    )
    assert kv_token_bytes(config, sizes) == sizes.config["num_hidden_layers"] * page.page_size_bytes / 16
    computed = AutoModelForCausalLM.from_pretrained(config.model.path).model.layers[0].self_attn
    # Of all heads
    keys = computed.kv_b_proj.out_features + computed.num_heads * sizes.config["qk_rope_head_dim"]
    assert attention_elements(config.policy, sizes) == (computed.q_b_proj.out_features, keys)


def test_an_engine_that_sleeps_leaves_its_memory_to_training(tiny_qwen2: Path) -> None:
    config = recipe(tiny_qwen2, engine={"kv_cache_gib": 0.5, "max_model_len": 200})
    sizes = model_sizes(config, config.model.path)
    parts = engine_parts(config, sizes, 1, 8.0)
    assert by_name(parts)["engine: KV cache"] == (GIB / 2, 0)
    token = kv_token_bytes(config, sizes)
    assert parts[1].remark == f"{GIB // 2 // token:,} tokens: {GIB // 2 // token // 200} answers of 200"
    config = recipe(tiny_qwen2, engine={"sleep": False, "gpu_memory_utilization": 0.5})
    weights, cache = (
        by_name(engine_parts(config, sizes, 1, 8.0))[f"engine: {part}"]
        for part in ("weights", "KV cache")
    )
    assert weights == (4 * sizes.total, 4 * sizes.total)
    assert cache == (4 * GIB - weights[0], 4 * GIB - weights[0])


@pytest.fixture
def written(tiny_qwen2: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(recipe(tiny_qwen2).model_dump(mode="json")))
    return path


def test_a_plan_is_shown_without_loading_weights_or_data(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("trainer.policy.hf_format.load_sharded", refuse)
    monkeypatch.setattr("trainer.data.prompts.load_rows", refuse)
    assert main(["plan", str(written), "--ranks", "4", "--device-gib", "80.5"]) == 0
    output = capsys.readouterr().out
    assert "4, on cpu" in output and "12 prompts x 4 = 48" in output and "times 4, of 80.5 GiB" in output
    assert max(map(len, output.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "sentence", "planned"),
    [
        (["--ranks", "5"], "must be divisible by the number of ranks (5)", True),
        (["--sampling.temperature", "0"], "sampling.temperature is 0", True),
        (["--model.path", "absent/model/x"], "model.path: there is no folder absent/model/x", False),
        (["--ranks", "0"], "--ranks must be at least 1", False),
        (["--ranks", "many"], "invalid int value", False),
        (["--batch.prompt_per_step", "3"], "did you mean batch.prompts_per_step?", False),
    ],
)
def test_problems_are_printed_after_the_plan(
    words: list[str], sentence: str, planned: bool, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, "plan", str(written), *words)
    assert ("answers a step" in capsys.readouterr().out) == planned


def test_a_plan_says_how_much_prompts_computed_once_save(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group of 8 answers of 4 tokens to a prompt of 100 has 832 tokens, of which 132 are computed."""
    sizes = ["--data.max_prompt_tokens", "100", "--sampling.max_tokens", "8", "--eval.max_tokens", "8"]
    sizes += [
        "--engine.max_model_len",
        "128",
        "--algorithm.group_size",
        "8",
        "--batch.prompts_per_step",
        "2",
    ]
    sizes += ["--batch.updates_per_step", "1"]
    lengths = ["--prompt-tokens", "100", "--answer-tokens", "4"]
    assert main(["plan", str(written), *sizes, *lengths]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "264 of a rank's 1,664 tokens in a step (6.30 x fewer)" in printed
    assert main(["plan", str(written), *sizes, *lengths, "--batch.packing", "false"]) == 0
    assert (
        "prefixes are computed for each answer, since batch.packing is false" in capsys.readouterr().out
    )
    assert main(["plan", str(written), *sizes, *lengths, "--batch.share_prefixes", "false"]) == 0
    assert "computed" not in capsys.readouterr().out


def test_largest_micro_batches_of_shared_prompts_need_less_memory(tiny_qwen2: Path) -> None:
    """A budget beyond everything: activations are those of computed tokens."""
    needed, kept = [], []
    for share in (False, True):
        batch = {"tokens_per_micro_batch": 10**6, "prompts_per_step": 2, "share_prefixes": share}
        sizes = {
            "data": {"max_prompt_tokens": 400},
            "sampling": {"max_tokens": 100},
            "algorithm": {"group_size": 8},
        }
        config = recipe(tiny_qwen2, batch=batch, **sizes)
        model = model_sizes(config, config.model.path, config.lora)
        parts = trainer_parts(config, model, 1, 80.0)
        needed.append(sum(part.training for part in parts if "activations" in part.name))
        kept.append(activation_bytes(config, config.policy, model, 1)[1])
    assert 0.1 < needed[1] / needed[0] < 0.5
    tokens, computed = 8 * 500, 400 + 8 * 100  # of an update on one group
    copies = 4 * attention_elements(config.policy, model)[1] * (tokens - computed)
    assert kept[1] == pytest.approx(kept[0] * computed / tokens + model.layers * copies)
    # In a hybrid with half of its matrices in mixers, half of each layer's activations are not shared
    hybrid = replace(model, flops=replace(model.flops, recurrent=model.flops.trunk // 2))
    shared = activation_bytes(config, config.policy, hybrid, 1)[1]
    assert shared == pytest.approx(
        kept[0] * (computed / tokens + 1) / 2 + model.layers * copies, rel=0.01
    )


def test_a_plan_that_exceeds_a_device_is_refused_with_numbers(
    tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is refused before anything starts, with the numbers of its parts; neither half of a step may exceed the
    device.
    """
    config = recipe(tiny_qwen2, run={"device": "cuda"}, engine={"kv_cache_gib": 60.0})
    model = model_sizes(config, config.model.path, config.lora)
    parts = [*trainer_parts(config, model, 2, 80.0), *engine_parts(config, model, 2, 80.0)]
    needed = sum(part.generating for part in parts) / GIB
    assert (
        list(over_budget(config, model, 2, needed))
        == list(over_budget(config, model, 2, needed / 1.04))
        == []
    )
    (sentence,) = over_budget(config, model, 2, 48.0)
    start = f"while answers are generated a rank needs {needed:.1f} GiB, and its device has 48.0 (engine: KV cache 60.0"
    assert sentence.startswith(start) and "lower engine.kv_cache_gib" in sentence
    kept = recipe(tiny_qwen2, run={"device": "cuda"}, engine={"kv_cache_gib": 60.0, "sleep": False})
    assert [problem.partition(" a rank")[0] for problem in over_budget(kept, model, 2, 48.0)] == [
        "while the run starts",
        "while answers are generated",
        "while the policy is updated",
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 48 * GIB))
    with pytest.raises(UserError, match="its device has 48.0"):
        check_budget(config, torch.device("cuda"), 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * GIB))
    check_budget(config, torch.device("cuda"), 2)


def test_the_recipe_of_long_answers_fits_a_node_and_starts_dry(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has the sizes of Qwen3-14B's config.json, and a small tokenizer and data."""
    model, data, file = tmp_path / "model", tmp_path / "data.jsonl", "long_answers_qwen3_14b_8gpu.yaml"
    sizes = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    }
    sizes |= {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    shutil.copytree(tiny_qwen3, model)
    Qwen3Config(**sizes, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        model
    )
    write_weights(model)
    data.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    here = [
        "--model.path",
        str(model),
        "--data.path",
        str(data),
        "--run.output_dir",
        str(tmp_path / "runs"),
        "--reward.timeout_s",  # a busy machine takes long to judge the one answer
        "300",
    ]
    recipe = [str(ROOT / "scripts" / "recipes" / file), *here]
    assert main(["plan", *recipe, "--ranks", "8", "--gpu", "h100"]) == 0
    output = capsys.readouterr().out
    (total,) = [
        line.replace("│", " ").split() for line in output.splitlines() if line.startswith("│ sum")
    ]
    assert all(float(gib) < 72 for gib in total[1:3]), total
    assert "answers an update and 4 ranks that share them" in output and "update: exchanges" in output
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["train", *recipe, "--dry-run"]) == 0
    assert "sequence_parallel: 4" in capsys.readouterr().out
