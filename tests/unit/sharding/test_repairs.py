"""What vLLM's layers do after their repairs, beside Transformers' layers and a list of names."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from sharding.worker.repairs import keep_bias_of_head, keep_scalars_of_xielu, load_biases_of_experts


def test_xielu_computes_with_scalars_of_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XIELU, "__init__", XIELU.__init__)  # put back afterwards
    keep_scalars_of_xielu()
    with set_current_vllm_config(VllmConfig()):
        repaired = XIELU()
    expected = XIELUActivation(dtype=torch.float32)
    with torch.no_grad():
        for name, value in (("alpha_p", 0.3217), ("alpha_n", -0.7893)):
            for layer in (repaired, expected):
                getattr(layer, name).fill_(value)
        values = 3 * torch.randn(1000)
        assert torch.allclose(repaired.forward_native(values), expected(values), atol=1e-6)


def test_a_correction_bias_among_the_experts_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def load_experts(layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, _ in weights:
            seen.append(name)
            yield f"w of {name}"

    monkeypatch.setattr(RoutedExperts, "load_weights", load_experts)
    load_biases_of_experts()
    bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    sent = [("0.up_proj.weight", torch.ones(3)), ("e_score_correction_bias", torch.tensor([1.0, -2.0]))]
    layer = SimpleNamespace(e_score_correction_bias=bias)
    loaded = [*RoutedExperts.load_weights(layer, iter([*sent, ("1.up_proj.weight", torch.ones(3))]))]  # type: ignore[arg-type]
    assert seen == ["0.up_proj.weight", "1.up_proj.weight"] and bias.tolist() == [1.0, -2.0]
    assert loaded == ["w of 0.up_proj.weight", "w of 1.up_proj.weight", "e_score_correction_bias"]


def test_a_head_keeps_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards
    monkeypatch.setattr(ParallelLMHead, "_register_bias", ParallelLMHead._register_bias)
    keep_bias_of_head()
    head = ParallelLMHead.__new__(ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.num_embeddings_per_partition, head.params_dtype = 4, torch.float32
    head._register_bias()
    bias = head.bias
    head._register_bias()
    assert head.bias is bias and bias.shape == (4,)
