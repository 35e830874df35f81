"""The modules of an engine that keep their weights as they are loaded."""

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    convert_to_unquantized_kernel_format,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from sharding.worker import gpt_oss
from sharding.worker.cpu import PlainExperts
from sharding.worker.gpt_oss import through_loaders
from sharding.worker.loader import reprocessed_modules


def with_method(name: str, **attributes: object) -> nn.Module:
    module = nn.Linear(2, 2)
    module.quant_method = type(name, (), attributes)()
    return module


def test_experts_are_replayed_where_the_kernels_keep_them_and_reloaded_elsewhere() -> None:
    """vLLM's own conversion decides: experts are replayed if it keeps the same memory with the same values."""
    backends = UnquantizedMoeBackend
    for backend in (backends.TRITON, backends.BATCHED_TRITON, backends.FLASHINFER_CUTLASS, backends.CPU):
        experts = with_method("UnquantizedFusedMoEMethod", unquantized_backend=backend)
        model = nn.ModuleList([with_method("UnquantizedLinearMethod"), experts])
        w13, w2 = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
        before = w13.clone()
        config = type("Config", (), {"is_act_and_mul": True})()
        new, _ = convert_to_unquantized_kernel_format(backend, config, w13, w2)
        kept = new.data_ptr() == w13.data_ptr() and torch.equal(new, before)
        # On CPU they are packed after this (experts/cpu_moe.py, process_weights_after_loading).
        kept = kept and backend is not backends.CPU
        assert reprocessed_modules(model, plain_on_cpu=True) == ([] if kept else [experts])
        assert kept == (backend in (backends.TRITON, backends.BATCHED_TRITON))
    plain = with_method(
        "UnquantizedFusedMoEMethod", unquantized_backend=backends.CPU, experts_cls=PlainExperts
    )
    assert reprocessed_modules(nn.ModuleList([plain]), plain_on_cpu=True) == []


def test_quantised_modules_are_reloaded() -> None:
    quantised = with_method("Fp8LinearMethod")
    assert reprocessed_modules(nn.ModuleList([quantised]), plain_on_cpu=True) == [quantised]


def test_weights_of_gpt_oss_pass_the_loaders_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts arrive one by one under the names that vLLM's loader splits, sinks cut for the second of two ranks."""

    @wraps(default_weight_loader)
    def reloading(_: Any, weight: torch.Tensor) -> None:
        loaded.append(weight)

    monkeypatch.setattr(gpt_oss, "get_tensor_model_parallel_rank", lambda: 1)
    loaded: list[torch.Tensor] = []
    sinks: Any = nn.Parameter(torch.empty(2, device="meta"))
    sinks.weight_loader = reloading
    parameters = {"layers.0.attn.sinks": sinks, "layers.1.attn.sinks": torch.empty(2)}
    model: Any = SimpleNamespace(get_parameter=parameters.__getitem__)
    gates, biases = torch.randn(3, 4, 10), torch.randn(3, 4)
    other = {"layers.0.mlp.router.weight": torch.randn(3), "layers.1.self_attn.sinks": torch.randn(4)}
    weights = {"mlp.experts.gate_up_proj": gates, "mlp.experts.down_proj_bias": biases, **other}
    weights["layers.0.self_attn.sinks"] = torch.arange(4)
    expected = {f"mlp.experts.{n}.w13_weight": expert for n, expert in enumerate(gates)}
    expected |= {f"mlp.experts.{n}.w2_bias": expert for n, expert in enumerate(biases)} | other
    got = dict(through_loaders(model, list(weights.items())))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())
    assert [weight.tolist() for weight in loaded] == [[2, 3]]


def test_sinks_are_cut_once_where_their_loader_takes_its_ranks_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.33 gives sinks such a loader; a reload wraps it, and calls it with a parameter of this rank's heads."""
    monkeypatch.setattr(gpt_oss, "get_tensor_model_parallel_rank", lambda: 1)

    def load_attention_sink(parameter: torch.Tensor, weight: torch.Tensor) -> None:
        parameter.copy_(weight.narrow(0, len(weight) // 2, len(weight) // 2))

    @wraps(load_attention_sink, assigned=("__doc__", "__annotations__"))
    def reloading(_: torch.Tensor, weight: torch.Tensor) -> None:
        load_attention_sink(held, weight)

    held = torch.zeros(2)
    sinks: Any = nn.Parameter(torch.empty(2, device="meta"))
    sinks.weight_loader = reloading
    model: Any = SimpleNamespace(get_parameter={"layers.0.attn.sinks": sinks}.__getitem__)
    assert not list(through_loaders(model, [("layers.0.self_attn.sinks", torch.arange(4.0))]))
    assert held.tolist() == [2, 3]
