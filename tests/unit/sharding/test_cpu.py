"""Experts computed in the layout of the checkpoint, beside a loop over tokens and vLLM's own kernel on packed ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from sharding.worker.cpu import PlainExperts

EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 32


def by_loop(states: Tensor, w1: Tensor, w2: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
    output = torch.zeros(states.shape)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            gate, up = linear(states[token].float(), w1[expert].float()).chunk(2)
            done = linear(silu(gate) * up, w2[expert].float())
            output[token] += done if weights is None else done * weights[token, place]
    return output


@pytest.mark.parametrize(("top_k", "weighted"), [(3, False), (1, False), (1, True)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("tokens", [1, 17])
def test_plain_experts_are_a_loop_over_tokens_and_vllms_kernel(
    tokens: int, dtype: torch.dtype, bound: float, top_k: int, weighted: bool
) -> None:
    """Plain experts equal a loop over tokens and vLLM's kernel, also where experts have no token. Inputs that are
    weighted already have one expert a token.
    """
    states = torch.randn(tokens, HIDDEN).to(dtype)
    w1 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 6).to(dtype)
    weights, ids = torch.rand(tokens, EXPERTS - 1).softmax(-1).topk(top_k)  # none has the last
    plain, packed = torch.empty_like(states), torch.empty_like(states)
    kernel = PlainExperts.__new__(PlainExperts)
    kernel.apply(plain, states, w1, w2, weights, ids.int(), apply_router_weight_on_input=weighted)
    vllms = [cpu_prepack_moe_weight(weight, "vec") for weight in (w1, w2)]
    cpu_fused_moe(packed, states, *vllms, None, None, weights, ids.int(), "silu", "vec", weighted)
    expected = by_loop(states, w1, w2, None if weighted else weights, ids)
    assert torch.allclose(plain.float(), expected, rtol=bound, atol=bound * expected.abs().max().item())
    assert torch.allclose(plain.float(), packed.float(), rtol=bound, atol=bound * expected.abs().max().item())


@pytest.mark.parametrize(
    "other",
    [{"has_bias": True}, {"activation": MoEActivation.GELU}, {"moe_parallel_config": SimpleNamespace(use_ep=True)}],
)
def test_other_experts_are_left_to_vllm(other: dict[str, object]) -> None:
    config = {
        "has_bias": False,
        "activation": MoEActivation.SILU,
        "moe_parallel_config": SimpleNamespace(use_ep=False),
    }
    supported, reason = PlainExperts.is_supported_config(
        PlainExperts, SimpleNamespace(**config | other), None, None, None
    )
    assert not supported and reason
