"""Checks of policies against plain Transformers in one process, for test_policy.py, on one or several ranks."""

import json
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from sharding.ranks import all_reduce_sum, rank, sum_counts, world_size
from sharding.send.source import FsdpWeightSource
from tests.support.gathering import assert_ranks_hold, sent, sent_in_parts
from tests.support.rank_checks import Checks
from tests.support.row_advantages import advantage, advantages
from trainer.algorithms import aggregation
from trainer.build import weight_source
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.learning.batching import deal, micro_batches
from trainer.policy import FrozenPolicy, FsdpPolicy, Outputs, fsdp
from trainer.policy.buffers import ROUTE_BIASES
from trainer.policy.fused import Fused, fuse
from trainer.policy.hf_format import build_meta_model
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.optimizer import TrainingDiverged
from trainer.policy.routing import Routing, balance, find_routers, loads_of
from trainer.types import MicroBatch, RouteFormat, Sample

logging.disable_progress_bar()

CPU = torch.device("cpu")
VOCABULARY = 257  # prime: divisible by no number of ranks
KINDS = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("llama", False),
    ("gemma3", True),
    ("qwen3_moe", False),
    ("deepseek_v2", False),
    ("deepseek_v3", False),
]
TEMPERATURE = 0.7
LENGTHS = [3, 19, 7, 12, 2, 30, 1, 9, 11]
ways = 1  # ranks that share a micro-batch; sequence_checks.py changes it to run these checks


def make_model(kind: str, folder: Path, tied: bool, experts: int = 5) -> None:
    """Write a tiny random model, with weights larger than usual so that its distributions are far from uniform."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    moe = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    }
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    mla = {
        "moe_intermediate_size": 24,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }
    config = {
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=8),
        "llama": lambda: LlamaConfig(**shape),
        "gemma3": lambda: Gemma3TextConfig(
            **shape, head_dim=8, query_pre_attn_scalar=8, sliding_window=5
        ),
        "qwen3_moe": lambda: Qwen3MoeConfig(**shape, **moe, head_dim=8),
        "deepseek_v2": lambda: DeepseekV2Config(
            **shape | {"num_key_value_heads": 4}, **latent, **mla, first_k_dense_replace=1
        ),
        "deepseek_v3": lambda: DeepseekV3Config(
            **shape | {"num_key_value_heads": 4},
            **latent,
            **mla,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
    }[kind]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTE_BIASES):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)


def make_models(folder: Path) -> Path:
    """Write a model for each of KINDS, in a folder of its own."""
    for kind, tied in KINDS:
        make_model(kind, model_folder(folder, kind, tied), tied)
    return folder


def model_folder(folder: Path, kind: str = "qwen2", tied: bool = True) -> Path:
    """Return the folder of this model below `folder`; that of a family (`tests.support.families`) has its name."""
    family = folder / kind
    return family if family.is_dir() else folder / f"{kind}_{'tied' if tied else 'untied'}"


def make_policy(folder: Path, trainable: bool = True, **settings: Any) -> FsdpPolicy:
    """Return a policy in float32 whose gradients are not clipped."""
    settings = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": 1e9} | settings
    return FsdpPolicy(ModelConfig(path=str(folder)), PolicyConfig(**settings), CPU, trainable=trainable)


def make_samples(lengths: list[int] = LENGTHS) -> list[Sample]:
    """Random ids with an arbitrary mask; one sequence is fully masked."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        mask = [int(i != 2 and position >= 1 and position % 4 != 3) for position in range(length)]
        samples.append(Sample(ids, mask, [0.0] * length))
    return samples


# The plain computation -----------------------------------------------------------------------------------------------


def plain_logprobs(model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of all targets of one sequence, unpadded, through the whole logits tensor."""
    ids = torch.tensor([sample.input_ids])
    log_p = torch.log_softmax(model(ids).logits[0, :-1].float() / TEMPERATURE, dim=-1)
    return log_p.gather(1, ids[0, 1:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def plain_loss(model: PreTrainedModel, samples: list[Sample], name: str) -> Tensor:
    """Return the loss of `make_loss`, as a loop over sequences."""
    masks = [torch.tensor(s.loss_mask[1:], dtype=torch.float32) for s in samples]
    total = sum(m.sum() for m in masks) if name == "token_mean" else sum(1 for m in masks if m.any())
    loss = torch.zeros(())
    for sample, mask in zip(samples, masks, strict=True):
        logprobs, entropy = plain_logprobs(model, sample)
        weight = mask / (1 if name == "token_mean" else max(1, mask.sum()))
        loss = loss + ((-advantage(sample.input_ids) * logprobs - 0.1 * entropy) * weight).sum() / total
    return loss


def plain_gradients(folder: Path, samples: list[Sample], name: str) -> dict[str, Tensor]:
    """Gradients of `plain_loss` in plain Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    plain_loss(model, samples, name).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def make_loss(
    batches: list[MicroBatch], name: str = "token_mean", factor: float = 1.0
) -> Callable[..., Any]:
    """Return a loss of advantages and entropy, averaged over all ranks by the aggregation `name`, times `factor`."""
    counted = [
        b.loss_mask.sum() if name == "token_mean" else b.loss_mask.any(dim=1).sum() for b in batches
    ]
    counts = all_reduce_sum({"count": float(sum(counted)) / ways})

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        per_token = -advantages(batch) * outputs.logprobs - 0.1 * outputs.entropy
        loss = (
            per_token * aggregation.weights(batch.loss_mask, name, counts["count"], counts["count"], 1)
        ).sum()
        return loss * factor, {"tokens": batch.loss_mask.sum()}

    return loss_fn


def policy_gradients(policy: FsdpPolicy, batches: list[MicroBatch], name: str) -> dict[str, Tensor]:
    """Return the gradients that an update applies, gathered; the update is made, too."""
    captured: dict[str, Tensor] = {}

    def capture(*_: Any) -> None:
        captured.update({key: p.grad.full_tensor().clone() for key, p in policy.named_parameters()})

    handle = policy.optimizer.register_step_pre_hook(capture)
    policy.update(batches, make_loss(batches, name), TEMPERATURE)
    handle.remove()
    return captured


def assert_gradients_equal(
    got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6
) -> None:
    """Gradients differ by at most `tolerance` times the largest element, or times 1 if all are smaller."""
    assert got.keys() == expected.keys()
    tolerance *= max(1.0, *(float(g.abs().max()) for g in expected.values()))
    for name in expected:
        distance = float((got[name] - expected[name]).abs().max())
        assert distance <= tolerance, f"{name} is off by {distance}, more than {tolerance}"


def own_batches(samples: list[Sample], budget: int, packing: bool = False) -> list[MicroBatch]:
    """Micro-batches of this rank's samples."""
    return micro_batches(own_samples(samples), budget, 0, CPU, packing=packing or ways > 1, ways=ways)


def own_samples(samples: list[Sample]) -> list[Sample]:
    """Return the samples that are dealt to this rank."""
    return [
        samples[i]
        for i in deal([len(s.input_ids) for s in samples], lambda length: length, ways)[rank()]
    ]


def weights(policy: FsdpPolicy) -> dict[str, Tensor]:
    """Copy of the whole weights."""
    return {name: p.detach().full_tensor().clone() for name, p in policy.named_parameters()}


def compile_without_code(patch: pytest.MonkeyPatch) -> None:
    """Leave out the code generator, which is PyTorch's and takes a minute, where layers are compiled."""
    patch.setattr(fsdp, "fuse", partial(fuse, make=partial(Fused, backend="aot_eager")))
    torch._dynamo.reset()


def check_planned_traffic(folder: Path, **settings: Any) -> None:
    """The plan counts the collectives that are really called."""
    from tests.support.counted_collectives import check_traffic  # it imports this module

    for tied in (True, False):
        check_traffic(folder, tied, activation_checkpointing="full", **settings)


# The checks ----------------------------------------------------------------------------------------------------------


def check_loading(folder: Path, kind: str, tied: bool) -> None:
    """Sharded loading gives the weights of from_pretrained, and the policy computes the same."""
    source = model_folder(folder, kind, tied)
    policy, plain = (
        make_policy(source),
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(),
    )
    expected = dict(plain.named_parameters())
    got = weights(policy)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert (policy.model.lm_head.weight is policy.model.model.embed_tokens.weight) == tied
    held = sum(p.to_local().numel() for _, p in policy.named_parameters())
    assert all_reduce_sum({"elements": held})["elements"] == sum(p.numel() for p in expected.values())
    samples = make_samples()
    batches = micro_batches(samples, 60, 0, CPU)
    with torch.no_grad():
        for batch, outputs in zip(batches, policy.score(batches, TEMPERATURE), strict=True):
            for row, index in enumerate(batch.rows):
                mask = torch.tensor(samples[index].loss_mask[1:])
                wanted = plain_logprobs(plain, samples[index])[0] * mask
                torch.testing.assert_close(
                    outputs.logprobs[row, : len(mask)], wanted, atol=2e-5, rtol=1e-5
                )
                assert not outputs.logprobs[row, len(mask) :].any()
    assert all(not p.to_local().is_meta for _, p in policy.named_parameters()), (
        "parameters must be sharded again"
    )


def check_sent(policy: Any) -> None:
    """The engine would be sent, and compared with, the checkpoint that the policy was loaded from, cast once.

    The biases that decide routes are not cast.
    """
    stored = load_file(policy.source / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        source = weight_source(policy, dtype)
        expected = {
            name: w if name.endswith(ROUTE_BIASES) else w.to(dtype) for name, w in stored.items()
        }
        for got in (sent(source), sent_in_parts(source, 1 << 14)):
            assert got.keys() == expected.keys()
            for name, weight in expected.items():
                assert torch.equal(got[name], weight), name
        assert_ranks_hold(source, expected)


def check_gradients(
    folder: Path, kind: str, tied: bool, budget: int, name: str, packing: bool = False, **settings: Any
) -> None:
    """Gradients of an update are those of plain Transformers in one process."""
    source, samples = model_folder(folder, kind, tied), make_samples()
    got = policy_gradients(make_policy(source, **settings), own_batches(samples, budget, packing), name)
    assert_gradients_equal(got, plain_gradients(source, samples, name))


def check_fused(folder: Path, **settings: Any) -> None:
    """Gradients of fused norms, rotary embeddings and gates are those of plain Transformers in one process."""
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(disable=False):
        compile_without_code(patch)
        check_gradients(folder, "qwen3", True, 33, "token_mean", packing=True, compile=True, **settings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


def routed_samples(form: RouteFormat) -> list[Sample]:
    """Sample with random routes."""
    samples, generator = make_samples(), torch.Generator().manual_seed(2)
    for sample in samples:
        scores = torch.rand(
            len(sample.input_ids) - 1, len(form.layers), form.experts, generator=generator
        )
        sample.routes = scores.topk(form.top_k).indices.to(form.dtype)
    return samples


def check_routed(
    folder: Path,
    make: Callable[..., Any] = make_policy,
    gradients: Callable[..., Any] = policy_gradients,
    **settings: Any,
) -> None:
    """A mixture computes as one process does, with given routes, and with recorded ones and a balance loss."""
    source = model_folder(folder, "qwen3_moe", False)
    policy, plain = (
        make(source, **settings),
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train(),
    )
    routers = find_routers(build_meta_model(source, ModelConfig(path=str(source)), torch.float32, CPU))
    module = PolicyModule(plain, routing=Routing(plain, routers))
    assert module.routing is not None
    form = module.routing.format
    samples = routed_samples(form)
    one, batches = (
        micro_batches(samples, 10_000, 0, CPU, count=1),
        own_batches(samples, 33, packing=True),
    )
    module.routing.pull = balance(loads_of(one, form), form, coef=0.5)
    policy.routing.pull = balance(sum_counts(loads_of(batches, form)), form, coef=0.5)
    assert torch.equal(module.routing.pull, policy.routing.pull)
    tokens = sum(sample.trainable for sample in samples)
    scored = outputs(module, one[0], TEMPERATURE)
    (
        (-advantages(one[0]) * scored.logprobs - 0.1 * scored.entropy) * one[0].loss_mask / tokens
    ).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_gradients_equal(gradients(policy, batches, "token_mean"), expected)
    counts = [routing.take_counts() for routing in (module.routing, policy.routing)]
    assert torch.equal(sum_counts(counts[1][0]), counts[0][0])
    assert all_reduce_sum({"pulled": counts[1][2]})["pulled"] == pytest.approx(counts[0][2], rel=1e-6)


def check_uneven_work(folder: Path) -> None:
    """Gradients are right when rank 0 has one long sequence, rank 1 seven short ones, and rank 2 none."""
    samples = make_samples([40, 3, 4, 5, 6, 7, 8, 9])
    mine = [samples[:1], samples[1:], []][rank()]
    batches = micro_batches(mine, 10, 0, CPU)
    assert len(batches) == 6 and sum(1 for b in batches if not b.rows) == [5, 0, 6][rank()]
    source = model_folder(folder)
    assert_gradients_equal(
        policy_gradients(make_policy(source), batches, "token_mean"),
        plain_gradients(source, samples, "token_mean"),
    )


def check_nan_on_one_rank(folder: Path) -> None:
    """A NaN on one rank skips the update on all; the third in a row ends the training."""
    policy = make_policy(model_folder(folder), max_skipped_steps=3)
    batches = own_batches(make_samples(), 60)
    bad = make_loss(batches, factor=float("nan") if rank() == world_size() - 1 else 1.0)
    before = weights(policy)
    for count in (1, 2):
        stats = policy.update(batches, bad, TEMPERATURE)
        assert stats.skipped and policy.updates.skipped_in_a_row == count and policy.version == 0
    assert all(torch.equal(w, before[name]) for name, w in weights(policy).items())
    assert all(p.grad is None for _, p in policy.named_parameters())
    assert not policy.update(batches, make_loss(batches), TEMPERATURE).skipped
    assert policy.updates.skipped_in_a_row == 0 and policy.version == 1
    after = weights(policy)
    assert any(not torch.equal(w, before[name]) for name, w in after.items())
    for _ in range(2):
        policy.update(batches, bad, TEMPERATURE)
    with pytest.raises(TrainingDiverged, match="3 updates in a row"):
        policy.update(batches, bad, TEMPERATURE)
    assert all(torch.equal(w, after[name]) for name, w in weights(policy).items())


def check_small_steps_are_not_lost(folder: Path) -> None:
    """Steps too small for bfloat16 still change most of the float32 master weights."""
    policy = make_policy(model_folder(folder), dtype="bfloat16", lr=1e-6)
    before = weights(policy)
    batches = own_batches(make_samples(), 60)
    policy.update(batches, make_loss(batches), TEMPERATURE)
    after = weights(policy)
    assert {w.dtype for w in after.values()} == {torch.float32}
    states = policy.optimizer.state.values()
    assert {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    assert changed > 0.5 * sum(w.numel() for w in before.values())


def check_export(folder: Path, kind: str, tied: bool, dtype: str, **settings: Any) -> None:
    """An export after an update opens in plain Transformers, computes the same, and keeps the names and shapes."""
    source = model_folder(folder, kind, tied)
    target = folder / f"export_{kind}_{tied}_{dtype}_{world_size()}"
    (source / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    policy = make_policy(source, dtype=dtype, **settings)
    batches = micro_batches(make_samples(), 10000, 0, CPU)
    policy.update(batches, make_loss(batches), TEMPERATURE)
    policy.save_pretrained(target)
    with (
        safe_open(source / "model.safetensors", "pt") as old,
        safe_open(target / "model.safetensors", "pt") as new,
    ):
        shapes = [
            {key: file.get_slice(key).get_shape() for key in list(file.keys())} for file in (old, new)
        ]
    assert shapes[0] == shapes[1]
    plain = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    assert plain.dtype == getattr(torch, dtype) and plain.generation_config.temperature == 0.6
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [type(plain).__name__] and config["dtype"] == dtype
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights(policy)[name].to(parameter.dtype)), name
    again = make_policy(target, dtype=dtype, trainable=False)
    for one, other in zip(policy.score(batches, 1.0), again.score(batches, 1.0), strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=0, rtol=0)


def check_state_dict(folder: Path, **more: Any) -> None:
    """A policy that loads another's state after one update makes the same second update, bit for bit."""
    batches = own_batches(make_samples(), 60)
    settings = {"warmup_steps": 3, "weight_decay": 0.1} | more
    first = make_policy(model_folder(folder), **settings)
    first.update(batches, make_loss(batches), TEMPERATURE)
    second = make_policy(model_folder(folder), **settings)
    second.load_state_dict(first.state_dict())
    assert second.version == 1
    results = [p.update(batches, make_loss(batches), TEMPERATURE) for p in (first, second)]
    assert results[0] == results[1]
    restored = weights(second)
    assert all(torch.equal(w, restored[name]) for name, w in weights(first).items())


def check_shifts(make: Callable[..., Any], parameters: Callable[[Any], list[Tensor]]) -> None:
    """A policy that offloads its memory between updates makes the same updates, bit for bit, and syncs its weights.

    Args:
        make: makes a policy from a value of policy.offload.
        parameters: a policy's weights on this rank, as they lie in memory.
    """
    batches = own_batches(make_samples(), 60)
    away, stays = make("all"), make("none")
    for _ in range(3):
        results = [p.update(batches, make_loss(batches), TEMPERATURE) for p in (away, stays)]
        assert results[0] == results[1]
        state = away.release(weights=False)
        assert state > 0
        assert gathered(away) == gathered(stays)
        held = memory_of(parameters(away))
        assert away.release(weights=True) == held > 0 == memory_of(parameters(away))
        assert stays.release(weights=True) == 0
        away.restore()
    assert (
        away.score(batches, 1.0)[0].logprobs.tolist() == stays.score(batches, 1.0)[0].logprobs.tolist()
    )


def memory_of(tensors: list[Tensor]) -> int:
    """Return bytes of the tensors' storages; a storage with several views counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def gathered(policy: Any) -> list[bytes]:
    """Return the bytes that an engine would be sent, one entry a parameter."""
    source = FsdpWeightSource(list(policy.named_parameters()), torch.float32)
    parameters = source.parameters()
    slots = [torch.zeros(p.nbytes, dtype=torch.uint8) for p in parameters]
    source.gather_into([p.name for p in parameters], slots)
    sizes = [sum(prod(piece.shape) * 4 for piece in p.pieces) for p in parameters]
    return [slot[:size].numpy().tobytes() for slot, size in zip(slots, sizes, strict=True)]


def check_fsdp_shifts(folder: Path, **settings: Any) -> None:
    """Offloading between updates changes nothing under FSDP2."""
    check_shifts(
        lambda what: make_policy(model_folder(folder), offload=what, **settings),
        lambda policy: [p.to_local() for _, p in policy.named_parameters()],
    )


def check_reference_at_home(folder: Path) -> None:
    """An offloaded reference is in memory only while it scores, and scores as one that stays there."""
    config = PolicyConfig(dtype="float32", offload_reference=True)
    home = FrozenPolicy(ModelConfig(path=str(model_folder(folder))), config, CPU)
    stays, batches = make_policy(model_folder(folder), trainable=False), own_batches(make_samples(), 60)
    for _ in range(3):  # FSDP replaces its tensors at the first forward pass
        assert memory_of([p.to_local() for _, p in home.named_parameters()]) == 0
        scores = [
            [outputs.logprobs for outputs in policy.score(batches, 0.7)] for policy in (home, stays)
        ]
        assert (
            all(torch.equal(one, other) for one, other in zip(*scores, strict=True))
            and scores[0][0].any()
        )


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    checks: Checks = {}
    for kind, tied in KINDS:
        checks[f"loading {kind} {tied}"] = lambda k=kind, t=tied: check_loading(folder, k, t)
        checks[f"sent {kind} {tied}"] = lambda k=kind, t=tied: check_sent(
            make_policy(model_folder(folder, k, t))
        )
        for name, packing in [("token_mean", False), ("sequence_mean", True)]:
            checks[f"gradients {kind} {tied} {packing}"] = lambda k=kind, t=tied, n=name, p=packing: (
                check_gradients(folder, k, t, 33, n, p)
            )
    for layers in ("products", "every_second", "full"):
        checks[f"gradients recomputed {layers}"] = lambda layers=layers: check_gradients(
            folder, "qwen2", True, 33, "token_mean", packing=True, activation_checkpointing=layers
        )
        checks[f"gradients fused {layers}"] = lambda layers=layers: check_fused(
            folder, activation_checkpointing=layers
        )
    for layers in ("none", "full"):
        checks[f"routed {layers}"] = lambda layers=layers: check_routed(
            folder, activation_checkpointing=layers
        )
    checks["gradients kept gathered"] = lambda: check_gradients(
        folder, "qwen2", True, 33, "token_mean", reshard_after_forward=False
    )
    checks["NaN on one rank"] = lambda: check_nan_on_one_rank(folder)
    checks["small steps"] = lambda: check_small_steps_are_not_lost(folder)
    for kind, tied, dtype in [
        ("qwen2", True, "float32"),
        ("llama", False, "bfloat16"),
        ("qwen3_moe", False, "float32"),
    ]:
        checks[f"export {kind}"] = lambda k=kind, t=tied, d=dtype: check_export(folder, k, t, d)
    checks["restored state"] = lambda: check_state_dict(folder)
    checks["offloading"] = lambda: check_fsdp_shifts(folder)
    checks["offloaded reference"] = lambda: check_reference_at_home(folder)
    checks["planned collectives"] = lambda: check_planned_traffic(folder)
    return checks


def three_ranks(folder: Path) -> Checks:
    """Return the check of uneven work on three ranks."""
    return {"uneven work": lambda: check_uneven_work(folder)}
