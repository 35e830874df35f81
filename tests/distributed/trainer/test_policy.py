"""FsdpPolicy against plain Transformers, on one rank in this process and on two and three real ones.

Each group of ranks is launched once and runs `policy_checks`; a test here reads the result of one check.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sharding.send.source import local_part
from tests.support import policy_checks as checks
from tests.support.rank_checks import Failures, failures_of
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.policy import FsdpPolicy
from trainer.policy.hf_format import build_meta_model, checkpoint_views
from trainer.policy.hf_saving import save_pretrained
from trainer.policy.module import outputs

BY_KIND = pytest.mark.parametrize(("kind", "tied"), checks.KINDS)


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    return failures_of(checks.two_ranks, 2, models)


@BY_KIND
def test_one_rank_loads_the_weights_of_from_pretrained(
    one_rank: None, models: Path, kind: str, tied: bool
) -> None:
    checks.check_loading(models, kind, tied)


@pytest.mark.parametrize("what", checks.two_ranks(Path()))
def test_two_ranks_with_uneven_micro_batches_compute_as_one_process(
    two_ranks: Failures, what: str
) -> None:
    assert two_ranks[what] == ""


@BY_KIND
def test_one_rank_sends_the_checkpoint(one_rank: None, models: Path, kind: str, tied: bool) -> None:
    """test_hsdp.py has four ranks, test_deepspeed.py has ZeRO, and engine/test_sync.py has a real engine."""
    checks.check_sent(checks.make_policy(checks.model_folder(models, kind, tied)))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_one_and_four_micro_batches_have_the_plain_gradients(
    one_rank: None, models: Path, budget: int, name: str
) -> None:
    batches = checks.own_batches(checks.make_samples(), budget)
    assert len(batches) == (1 if budget > 40 else 4)
    checks.check_gradients(models, "qwen2", True, budget, name)


@pytest.mark.parametrize("layers", ["none", "products", "every_second", "full"])
def test_compiled_norms_rotations_and_gates_have_plain_gradients_in_few_graphs(
    one_rank: None, models: Path, monkeypatch: pytest.MonkeyPatch, layers: str
) -> None:
    """Pack of several lengths are used in an update, scored, and used again, with activations kept or recomputed."""
    checks.compile_without_code(monkeypatch)
    counted = torch._dynamo.utils.counters
    counted.clear()
    source = checks.model_folder(models, "qwen2", True)
    batches = checks.own_batches(checks.make_samples(), 33, packing=True)
    settings = {"activation_checkpointing": layers}
    # Other tests compile nothing. A layer that would silently run uncompiled raises here.
    with torch._dynamo.config.patch(disable=False, fail_on_recompile_limit_hit=True):
        policies = [checks.make_policy(source, **settings, compile=compile) for compile in (True, False)]
        for _ in range(2):
            stats = [
                policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
                for policy in policies
            ]
            assert stats[0].loss == pytest.approx(stats[1].loss, rel=1e-5)
            assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-4)
            scores = [policy.score(batches, checks.TEMPERATURE) for policy in policies]
            for ours, plain in zip(*scores, strict=True):
                torch.testing.assert_close(ours.logprobs, plain.logprobs, atol=1e-4, rtol=1e-4)
    assert 0 < counted["stats"]["unique_graphs"] <= 8, (
        "few graphs: norm, rotary embedding and gate, with and without gradients"
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_norms_of_gradients_are_the_plain_ones_and_leave_everything_as_it_was(
    one_rank: None, models: Path, kind: str
) -> None:
    batches = checks.own_batches(checks.make_samples(), 33, packing=True)
    policies = [checks.make_policy(checks.model_folder(models, kind, False)) for _ in range(2)]
    before = torch.get_rng_state(), policies[0].work.tokens
    norms = policies[0].gradient_norms(batches, checks.TEMPERATURE)
    assert torch.equal(torch.get_rng_state(), before[0]) and policies[0].work.tokens == before[1]
    assert all(parameter.grad is None for parameter in policies[0].trained().values())
    plain = policies[1].module.train()
    for batch in batches:
        result = outputs(plain, batch, checks.TEMPERATURE)
        ((result.logprobs + result.entropy) * batch.loss_mask).sum().backward()
    for norm, parameter in zip(norms, policies[1].trained().values(), strict=True):
        gradient = 0.0 if parameter.grad is None else local_part(parameter.grad).norm()
        assert float(norm) == pytest.approx(float(gradient), rel=1e-4, abs=1e-6)
    policies[1].optimizer.zero_grad()
    stats = [
        policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE) for policy in policies
    ]
    assert stats[0] == stats[1] and norms.norm() > 0


@pytest.mark.parametrize("compile", [False, True])
def test_given_routes_and_balance_on_one_rank_are_those_of_one_process(
    one_rank: None, models: Path, monkeypatch: pytest.MonkeyPatch, compile: bool
) -> None:
    checks.compile_without_code(monkeypatch)
    with torch._dynamo.config.patch(disable=False):
        checks.check_routed(models, compile=compile, activation_checkpointing="full")


def test_adapters_on_a_mixture_replay_routes_as_the_merged_model_does(
    one_rank: None, models: Path, tmp_path: Path
) -> None:
    source = checks.model_folder(models, "qwen3_moe", False)
    lora = LoraConfig(rank=2, target_modules=["q_proj", "v_proj"])
    config = PolicyConfig(dtype="float32", lr=0.1)
    policy = FsdpPolicy(ModelConfig(path=str(source), routes="engine"), config, checks.CPU, lora=lora)
    assert policy.routing is not None
    batches = micro_batches(
        checks.routed_samples(policy.routing.format), 33, 0, checks.CPU, packing=True
    )
    before = policy.score(batches, checks.TEMPERATURE)
    policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
    adapted = policy.score(batches, checks.TEMPERATURE)
    policy.save_pretrained(tmp_path)
    merged = FsdpPolicy(ModelConfig(path=str(tmp_path), routes="engine"), config, checks.CPU)
    for old, one, other in zip(before, adapted, merged.score(batches, checks.TEMPERATURE), strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)
        assert (one.logprobs - old.logprobs).abs().max() > 0.01
    assert not torch.equal(policy.routing.take_counts()[0], torch.zeros(2, 5))


def test_ranks_with_one_long_seven_short_and_no_sequences_agree(models: Path) -> None:
    assert failures_of(checks.three_ranks, 3, models) == {"uneven work": ""}


@BY_KIND
def test_an_export_may_be_in_several_files(
    one_rank: None, models: Path, tmp_path: Path, kind: str, tied: bool
) -> None:
    """The files have an index, as those of large models do, and are read back through it."""
    source = checks.model_folder(models, kind, tied)
    policy = checks.make_policy(source)
    save_pretrained(policy.model, tmp_path, torch.float32, source, shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not list(tmp_path.glob("*part*"))
    again = checks.weights(checks.make_policy(tmp_path))
    assert all(torch.equal(w, again[name]) for name, w in checks.weights(policy).items())


def test_a_reference_has_no_optimizer_and_no_gradients(one_rank: None, models: Path) -> None:
    policy = checks.make_policy(checks.model_folder(models), trainable=False, dtype="bfloat16")
    assert not hasattr(policy, "optimizer") and policy.state_dict()["optimizer"] == {}
    assert {(p.dtype, p.requires_grad) for _, p in policy.named_parameters()} == {
        (torch.bfloat16, False)
    }
    assert torch.isfinite(
        policy.score(checks.own_batches(checks.make_samples(), 60), 1.0)[0].logprobs
    ).all()


def test_checkpoint_views_of_fused_experts_go_expert_by_expert(models: Path) -> None:
    """The gate of each expert is before its up projection; the views equal slices of a real tensor."""
    source = checks.model_folder(models, "qwen3_moe", False)
    model = build_meta_model(source, ModelConfig(path=str(source)), torch.float32, checks.CPU)
    stored = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    views = checkpoint_views(model, name, (5, 48, 32))
    expected = [
        f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in range(5) for part in ("gate", "up")
    ]
    assert [view.name for view in views] == expected
    plain = checks.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).get_parameter(name)
    for view in views:
        piece = plain.flatten()[view.offset : view.offset + stored[view.name].numel()].view(view.shape)
        assert torch.equal(piece, stored[view.name])
    assert checkpoint_views(model, "model.norm.weight", (32,)) == [("model.norm.weight", 0, (32,))]
    model._weight_conversions = None  # Transformers then finds the conversions itself
    assert checkpoint_views(model, name, (5, 48, 32)) == views


def test_checkpoint_views_refuse_parts_that_are_not_contiguous(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checks.model_folder(models)
    model = build_meta_model(source, ModelConfig(path=str(source)), torch.float32, checks.CPU)
    for conversion, message in [
        (lambda _, state: {"x": state["w"].t()}, "not a contiguous part"),
        (lambda _, state: {"x": state["w"] + 1}, "not a contiguous part"),
        (lambda _, state: {"x": state["w"][:1]}, "cover 3 elements"),
        (lambda _, state: {"x": state["w"][1:]}, "begins at element 3"),
    ]:
        monkeypatch.setattr("trainer.policy.hf_format.revert_weight_conversion", conversion)
        with pytest.raises(ValueError, match=message):
            checkpoint_views(model, "w", (2, 3))


@pytest.mark.parametrize("fault", ["missing", "shape", "no file", "cut short", "no model"])
def test_a_bad_checkpoint_is_refused_in_one_line(
    one_rank: None, models: Path, tmp_path: Path, fault: str
) -> None:
    source = checks.model_folder(models)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    config = json.loads((source / "config.json").read_text())
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    (tmp_path / "config.json").write_text(json.dumps(config))
    if fault != "no file":
        save_file(tensors, tmp_path / "model.safetensors")
    if fault == "cut short":
        content = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    path = "/no/such/folder" if fault == "no model" else str(tmp_path)
    culprit = {"missing": name, "shape": name, "no model": path}.get(fault, "safetensors")
    with pytest.raises(UserError, match=culprit) as caught:
        FsdpPolicy(ModelConfig(path=path), PolicyConfig(), checks.CPU)
    assert "\n" not in str(caught.value)


def test_the_state_of_another_model_is_refused(one_rank: None, models: Path) -> None:
    state = checks.make_policy(checks.model_folder(models, "qwen3", True)).state_dict()
    with pytest.raises(ValueError, match="does not fit"):
        checks.make_policy(checks.model_folder(models)).load_state_dict(state)


def test_the_plan_counts_the_collectives_of_one_rank(one_rank: None, models: Path) -> None:
    checks.check_planned_traffic(models)
