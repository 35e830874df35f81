"""Mixtures of experts take the routes they are given, in every pass and under any batching."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    JambaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.support.row_advantages import advantages
from tests.unit.trainer.policy.test_packing import make_samples
from trainer.errors import UserError
from trainer.learning.batching import micro_batches
from trainer.policy import attention
from trainer.policy.hf_format import checkpoint_activations
from trainer.policy.module import PolicyModule, outputs
from trainer.policy.routing import Routing, asked_routers, balance, find_routers, loads_of
from trainer.types import MicroBatch, RouteFormat, Sample

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
DEEPSEEK = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=6, moe_intermediate_size=8, head_dim=4),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=6),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SHAPE, **LATENT, **DEEPSEEK, **GROUPS, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**SHAPE, **LATENT, **DEEPSEEK, **GROUPS),
    "glm4_moe": lambda: Glm4MoeConfig(**SHAPE, **DEEPSEEK, head_dim=4, n_group=1, topk_group=1),
    "minimax_m2": lambda: MiniMaxM2Config(**SHAPE, num_local_experts=6, head_dim=4),
}
LENGTHS = [9, 7, 7, 3, 1, 12]


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.set_attn_implementation(attention.implementation("sdpa", model))
    return model


def make_module(kind: str, record: bool = False, double: bool = False) -> PolicyModule:
    """Make the module in float64, which the grouped product does not support, so that the experts are a loop."""
    model = make_model(kind)
    if double:
        model.double().set_experts_implementation("eager")
    return PolicyModule(model, routing=Routing(model, find_routers(on_meta(CONFIGS[kind]())), record))


def random_routes(format: RouteFormat, tokens: int, generator: torch.Generator) -> Tensor:
    scores = torch.rand(tokens, len(format.layers), format.experts, generator=generator)
    return scores.topk(format.top_k).indices.to(format.dtype)


def routed_samples(format: RouteFormat, lengths: list[int] = LENGTHS) -> list[Sample]:
    samples, generator = make_samples(lengths), torch.Generator().manual_seed(3)
    for sample in samples:
        sample.routes = random_routes(format, len(sample.input_ids) - 1, generator)
    return samples


def updated(module: PolicyModule, batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Run forward and backward of one micro-batch after the other, as a policy does."""
    loss = 0.0
    for batch in batches:
        batch_loss = (outputs(module, batch, 0.7).logprobs * advantages(batch)).sum()
        batch_loss.backward()
        loss += batch_loss.item()
    return loss, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare to 1e-6 of the gradient's norm."""
    assert got.keys() == expected.keys()
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        assert (got[name] - grad).norm() <= 1e-6 * norm, name


class LoopExperts(nn.Module):
    """A mixture's block as a loop over tokens and their experts: the plain computation, routes being given."""

    def __init__(self, block: Any, rows: list[list[int]], routing: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.rows, self.routing = block, rows, routing

    def forward(self, hidden: Tensor) -> Tensor:
        flat, experts = hidden.flatten(0, 1), self.block.experts
        scores = self.routing(flat)
        tokens = []
        for token, token_scores, row in zip(flat, scores, self.rows, strict=True):
            weights = torch.stack([token_scores[e] for e in row])
            weights = self.block.plain_weights(weights)
            parts = []
            for expert, weight in zip(row, weights, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
                parts.append(weight * (experts.down_proj[expert] @ (nn.functional.silu(gate) * up)))
            tokens.append(torch.stack(parts).sum(dim=0))
        result = torch.stack(tokens).view_as(hidden)
        return (
            result + self.block.shared_experts(hidden)
            if hasattr(self.block, "shared_experts")
            else result
        )


def plain(kind: str, sample: Sample, format: RouteFormat) -> tuple[PreTrainedModel, Tensor]:
    """Return the model as a loop with the sample's routes, and its log-probabilities of the trained tokens."""
    model = make_model(kind)
    for position, layer in enumerate(format.layers):
        block = model.model.layers[layer].mlp
        weight = block.gate.weight
        bias = next(
            (b for name, b in block.named_buffers() if name.endswith("e_score_correction_bias")), None
        )
        scale = getattr(block.gate, "routed_scaling_factor", 1.0)
        normed = kind in ("mixtral", "deepseek_v3", "minimax_m2") or getattr(
            model.config, "norm_topk_prob", False
        )
        normed = normed and kind != "deepseek_v2"
        block.plain_weights = lambda w, n=normed, s=scale: (w / w.sum() if n else w) * s

        def scores(flat: Tensor, weight: Tensor = weight, sigmoid: bool = bias is not None) -> Tensor:
            return (flat @ weight.T).sigmoid() if sigmoid else (flat @ weight.T).softmax(-1)

        assert sample.routes is not None
        model.model.layers[layer].mlp = LoopExperts(block, sample.routes[:, position].tolist(), scores)
    ids = torch.tensor([sample.input_ids])
    hidden = model.model(ids[:, :-1]).last_hidden_state[0]
    log_p = torch.log_softmax(model.lm_head(hidden) / 0.7, dim=-1)
    return model, log_p.gather(1, ids[0, 1:, None])[:, 0] * torch.tensor(sample.loss_mask[1:])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_replayed_pass_is_a_plain_loop_over_the_given_experts(kind: str) -> None:
    module = make_module(kind)
    assert module.routing is not None
    sample = routed_samples(module.routing.format, [12])[0]
    (batch,) = micro_batches([sample], 100, 0, "cpu", 1, packing=True)
    logprobs = outputs(module, batch, 0.7).logprobs
    model, expected = plain(kind, sample, module.routing.format)
    torch.testing.assert_close(logprobs[0], expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    for position, layer in enumerate(module.routing.format.layers):
        got = module.model.model.layers[layer].mlp.gate.weight.grad
        plain_grad = model.model.layers[layer].mlp.block.gate.weight.grad
        assert got is not None and got.norm() > 0, position
        assert (got - plain_grad).norm() <= 1e-5 * plain_grad.norm().clamp(min=1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_replayed_experts_are_used_in_every_layer_and_in_recomputation(kind: str) -> None:
    module = make_module(kind)
    assert module.routing is not None
    format, used = module.routing.format, {layer: [] for layer in module.routing.format.layers}
    for layer, seen in used.items():
        module.model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[1].clone())
        )
    checkpoint_activations(module.model, "full")
    module.train()
    batches = micro_batches(routed_samples(format), 20, 0, "cpu", packing=True)
    for batch in batches:
        outputs(module, batch, 0.7).logprobs.sum().backward()
    for position, layer in enumerate(format.layers):
        expected = [
            b.routes[:, position].long() for b in batches if b.routes is not None for _ in range(2)
        ]
        assert len(used[layer]) == len(expected)  # once forward and once more in backward
        for got, rows in zip(used[layer], expected, strict=True):
            assert torch.equal(got.view_as(rows), rows)


def test_a_block_that_chooses_experts_by_itself_takes_routes() -> None:
    config = JambaConfig(
        **SHAPE, num_experts=4, attn_layer_period=1, attn_layer_offset=0, expert_layer_offset=0
    )
    config._attn_implementation = "eager"
    routers = find_routers(on_meta(config))
    # From Transformers 5.24 on, the block's router chooses, as those of other families do
    blocks = [name.removesuffix(".router") for name in routers.values()]
    assert blocks == ["model.layers.0.feed_forward", "model.layers.2.feed_forward"]
    model = AutoModelForCausalLM.from_config(config)
    routing, used = Routing(model, routers), list[Tensor]()
    for layer in routers:
        model.model.layers[layer].feed_forward.experts.register_forward_pre_hook(
            lambda _, args: used.append(args[1].clone())
        )
    (batch,) = micro_batches(routed_samples(routing.format, [12]), 100, 0, "cpu", 1, packing=False)
    outputs(PolicyModule(model, routing=routing), batch, 0.7).logprobs.sum().backward()
    assert batch.routes is not None
    assert [experts.tolist() for experts in used] == batch.routes.long().movedim(1, 0).tolist()
    assert all(model.model.layers[layer].feed_forward.router.weight.grad.norm() > 0 for layer in routers)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v2"])
def test_loss_and_gradients_do_not_depend_on_batching_or_checkpointing(kind: str) -> None:
    start = make_module(kind, double=True).train()
    assert start.routing is not None
    samples, results = routed_samples(start.routing.format), []
    for budget, packing, checkpointing in (
        (100, True, "none"),
        (100, False, "none"),
        (1, True, "full"),
        (20, True, "full"),
    ):
        module = make_module(kind, double=True).train()
        checkpoint_activations(module.model, checkpointing)
        results.append(updated(module, micro_batches(samples, budget, 0, "cpu", packing=packing)))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert_close(gradients, results[0][1])


@pytest.mark.parametrize("kind", CONFIGS)
def test_wrapped_routers_and_recorded_routes_change_no_bit(kind: str) -> None:
    batches = micro_batches(make_samples(LENGTHS), 20, 0, "cpu", packing=True)
    untouched = PolicyModule(make_model(kind))
    expected = updated(untouched, batches)
    module = make_module(kind, record=True)
    with torch.no_grad():
        recorded = [outputs(module, batch, 0.7).routes for batch in batches]
    reference = updated(module, batches)
    module.zero_grad()
    for batch, routes in zip(batches, recorded, strict=True):
        assert (
            routes is not None
            and module.routing is not None
            and routes.dtype == module.routing.format.dtype
        )
        batch.routes = routes
    replayed = updated(module, batches)
    for loss, gradients in (reference, replayed):
        assert loss == expected[0]
        assert all(torch.equal(gradients[name], grad) for name, grad in expected[1].items())


def test_recorded_routes_stay_when_the_router_has_changed() -> None:
    module = make_module("qwen3_moe", record=True)
    (batch,) = micro_batches(make_samples([12]), 100, 0, "cpu", 1, packing=True)
    with torch.no_grad():
        batch.routes = outputs(module, batch, 0.7).routes
        for layer in module.model.model.layers:
            layer.mlp.gate.weight.normal_(generator=torch.Generator().manual_seed(5))
        assert batch.routes is not None and module.routing is not None
        module.routing.take_counts()
        assert torch.equal(outputs(module, batch, 0.7).routes, batch.routes)
        loads, differ, _ = module.routing.take_counts()
        batch.routes, taken = None, batch.routes
        new_routes = outputs(module, batch, 0.7).routes
    assert new_routes is not None
    expected = (new_routes.sort(-1).values != taken.sort(-1).values).any(-1)[:, 0]
    assert differ >= int(expected.sum()) > 0  # later layers have other inputs, too
    assert loads.sum(1).tolist() == [22, 22, 22]


@pytest.mark.parametrize("packing", [True, False])
def test_loads_count_real_tokens_once_each(packing: bool) -> None:
    module = make_module("mixtral").train()
    assert module.routing is not None
    format = module.routing.format
    checkpoint_activations(module.model, "full")
    samples = routed_samples(format)
    batches = micro_batches(samples, 20, 0, "cpu", count=8, packing=packing)  # some of them empty
    updated(module, batches)
    expected = torch.zeros(len(format.layers), format.experts, dtype=torch.int64)
    for sample in samples:
        assert sample.routes is not None
        for row in sample.routes.tolist():
            for position, experts in enumerate(row):
                for expert in experts:
                    expected[position, expert] += 1
    assert torch.equal(module.routing.take_counts()[0], expected)
    assert not module.routing.take_counts()[0].any()
    assert torch.equal(loads_of(batches, format), expected)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_the_balance_loss_is_switch_transformers_under_any_batching(kind: str) -> None:
    """The loss is compared with autograd of the formula over the whole step; later layers see the first one's
    gradient.
    """
    coef, results = 0.1, []
    for budget, packing, checkpointing in ((1000, True, "none"), (1, True, "full"), (20, False, "none")):
        module = make_module(kind, double=True).train()
        checkpoint_activations(module.model, checkpointing)
        routing = module.routing
        assert routing is not None
        samples = routed_samples(routing.format)
        batches = micro_batches(samples, budget, 0, "cpu", packing=packing)
        routing.pull = balance(loads_of(batches, routing.format), routing.format, coef)
        for batch in batches:
            (outputs(module, batch, 0.7).logprobs.sum() * 0).backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append((routing.take_counts()[2], gradients))
    module, logits = make_module(kind, double=True).train(), {}
    assert module.routing is not None
    format = module.routing.format
    for layer in format.layers:
        module.model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _, __, out, layer=layer: logits.setdefault(layer, []).append(out[0])
        )
    for batch in micro_batches(routed_samples(format), 1, 0, "cpu", packing=True):
        if len(batch.input_ids[0]) > 1 and batch.lengths[0] > 1:
            outputs(module, batch, 0.7)
    routes = torch.cat([s.routes for s in routed_samples(format) if s.routes is not None]).long()
    loss = torch.zeros((), dtype=torch.float64)
    for position, layer in enumerate(format.layers):
        share = nn.functional.one_hot(routes[:, position], format.experts).double().mean(dim=(0, 1))
        mean = torch.cat(logits[layer]).softmax(-1).mean(dim=0)
        loss = loss + coef * format.experts * (share * mean).sum() / len(format.layers)
    loss.backward()
    expected = {
        name: p.grad for name, p in module.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert any("gate" in name for name in expected)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for value, gradients in results:
        assert value == pytest.approx(loss.item(), rel=1e-6)
        for name, grad in expected.items():
            assert (gradients[name] - grad).norm() <= 1e-6 * norm, name


def test_routers_are_found_in_the_layers_that_have_experts() -> None:
    assert find_routers(on_meta(CONFIGS["deepseek_v2"]())) == {
        n: f"model.layers.{n}.mlp.gate" for n in (1, 2)
    }
    assert list(find_routers(on_meta(CONFIGS["qwen3_moe"]()))) == [0, 1, 2]
    assert list(find_routers(on_meta(CONFIGS["mixtral"]()))) == [0, 1, 2]
    gpt_oss = GptOssConfig(**SHAPE, num_local_experts=4, head_dim=4)
    assert list(find_routers(on_meta(gpt_oss))) == [0, 1, 2]
    assert find_routers(on_meta(Qwen2Config(**SHAPE))) == {}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_balance_loss_of_sigmoid_scores_is_refused(kind: str) -> None:
    model = on_meta(CONFIGS[kind]())
    if kind in ("deepseek_v3", "glm4_moe", "minimax_m2"):
        with pytest.raises(
            UserError, match=r"balance_coef: model\.layers.*gate scores experts by sigmoids.*to 0"
        ):
            asked_routers(model, "recorded", balanced=True)
    else:
        assert asked_routers(model, "recorded", balanced=True)


def test_routers_that_cannot_be_replaced_are_refused_by_name() -> None:
    model = on_meta(CONFIGS["qwen3_moe"]())
    gate = model.model.layers[1].mlp.gate
    inner = gate.forward

    def twice(hidden: Tensor) -> Any:
        logits, scores, _ = inner(hidden)
        return logits, scores, logits.topk(2).indices

    gate.forward = twice
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.mlp\.gate chooses experts 2 times.*set it to own"
    ):
        asked_routers(model, "engine")
    assert asked_routers(model, "own") == {}
    phimoe = on_meta(PhimoeConfig(**SHAPE, num_local_experts=4))
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp.* set it to own"):
        asked_routers(phimoe, "recorded")
    with pytest.raises(
        UserError, match="model.routes is engine, but Qwen2ForCausalLM has no experts: set it to own"
    ):
        asked_routers(on_meta(Qwen2Config(**SHAPE)), "engine")


def test_replay_replaces_only_the_last_choice_of_group_limited_routers() -> None:
    """Experts outside of the groups that the router itself would choose keep their scores."""
    module = make_module("deepseek_v2")
    assert module.routing is not None
    format = module.routing.format
    sample = routed_samples(format, [12])[0]
    (batch,) = micro_batches([sample], 100, 0, "cpu", 1, packing=True)
    weights: list[Tensor] = []
    module.model.model.layers[1].mlp.experts.register_forward_pre_hook(
        lambda _, args: weights.append(args[2])
    )
    with torch.no_grad():
        outputs(module, batch, 0.7)
    assert weights[0].shape == (11, 2) and bool((weights[0] > 0).all())


def test_rows_for_another_number_of_tokens_are_refused_by_layer() -> None:
    module = make_module("qwen3_moe")
    assert module.routing is not None
    (batch,) = micro_batches(routed_samples(module.routing.format, [12]), 100, 0, "cpu", 1, packing=True)
    assert batch.routes is not None
    batch.routes = batch.routes[:-1]
    with pytest.raises(
        ValueError, match=r"layer 0 routes \[11, 2\] tokens and experts, but its routes are \[10, 2\]"
    ):
        outputs(module, batch, 0.7)
