"""Experts computed in the layout of the checkpoint, beside a loop over tokens and vLLM's own kernel on packed ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from sharding.worker.cpu import PlainExperts, choose_with_biases

EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 32


Biases = tuple[Tensor, Tensor] | None


def by_loop(
    states: Tensor, w1: Tensor, w2: Tensor, weights: Tensor | None, ids: Tensor, biases: Biases
) -> Tensor:
    """Gated SiLU, or with biases what gpt-oss computes (transformers/models/gpt_oss/modeling_gpt_oss.py)."""
    output = torch.zeros(states.shape)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if biases is None:
                gate, up = linear(states[token].float(), w1[expert].float()).chunk(2)
                done = linear(silu(gate) * up, w2[expert].float())
            else:
                both = linear(states[token].float(), w1[expert].float(), biases[0][expert].float())
                gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
                gated = (up + 1) * gate * torch.sigmoid(gate * 1.702)
                done = linear(gated, w2[expert].float(), biases[1][expert].float())
            output[token] += done if weights is None else done * weights[token, place]
    return output


@pytest.mark.parametrize(("top_k", "weighted"), [(3, False), (1, False), (1, True)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI])
def test_plain_experts_are_a_loop_over_tokens_and_vllms_kernel(
    activation: MoEActivation, tokens: int, dtype: torch.dtype, bound: float, top_k: int, weighted: bool
) -> None:
    """Plain experts equal a loop over tokens and vLLM's kernel, also where experts have no token. Inputs that are
    weighted already have one expert a token.
    """
    biases: Biases = None
    if activation == MoEActivation.SWIGLUOAI:
        biases = (
            4 * torch.randn(EXPERTS, 2 * INTERMEDIATE).to(dtype),
            torch.randn(EXPERTS, HIDDEN).to(dtype),
        )
    states = torch.randn(tokens, HIDDEN).to(dtype)
    w1 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 6).to(dtype)
    weights, ids = torch.rand(tokens, EXPERTS - 1).softmax(-1).topk(top_k)  # none has the last
    plain, packed = torch.empty_like(states), torch.empty_like(states)
    kernel = PlainExperts.__new__(PlainExperts)
    b1, b2 = biases or (None, None)
    kernel.quant_config = SimpleNamespace(w1_bias=b1, w2_bias=b2)  # type: ignore[assignment]
    kernel.apply(
        plain, states, w1, w2, weights, ids.int(), activation, apply_router_weight_on_input=weighted
    )
    vllms = [cpu_prepack_moe_weight(weight, "vec") for weight in (w1, w2)]
    cpu_fused_moe(packed, states, *vllms, b1, b2, weights, ids.int(), activation.value, "vec", weighted)
    expected = by_loop(states, w1, w2, None if weighted else weights, ids, biases)
    assert torch.allclose(plain.float(), expected, rtol=bound, atol=bound * expected.abs().max().item())
    assert torch.allclose(
        plain.float(), packed.float(), rtol=bound, atol=bound * expected.abs().max().item()
    )


@pytest.mark.parametrize(
    "other",
    [{"activation": MoEActivation.GELU}, {"moe_parallel_config": SimpleNamespace(use_ep=True)}],
)
def test_other_experts_are_left_to_vllm(other: dict[str, object]) -> None:
    config = {
        "activation": MoEActivation.SILU,
        "moe_parallel_config": SimpleNamespace(use_ep=False),
    }
    supported, reason = PlainExperts.is_supported_config(
        PlainExperts, SimpleNamespace(**config | other), None, None, None
    )
    assert not supported and reason


@pytest.mark.parametrize(
    ("scores", "biased"), [("sigmoid", True), ("sigmoid", False), ("softmax", True)]
)
def test_routers_without_groups_choose_by_sigmoids_and_biases(
    scores: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPURouter, "__init__", CPURouter.__init__)  # put back afterwards
    choose_with_biases()
    logits, bias = torch.randn(17, EXPERTS), torch.randn(EXPERTS) if biased else None
    router = CPURouter(
        3, EXPERTS, scoring_func=scores, routed_scaling_factor=2.5, e_score_correction_bias=bias
    )
    weights, ids = router._compute_routing(torch.empty(0), logits, None)
    for token, row in enumerate(logits):
        values = row.sigmoid() if scores == "sigmoid" else row.softmax(-1)
        best = sorted(range(EXPERTS), key=lambda e: -(values[e] + (0 if bias is None else bias[e])))[:3]
        assert sorted(ids[token].tolist()) == sorted(best)
        expected = {e: (2.5 * values[e] / values[best].sum()).item() for e in best}
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)
