"""The modules of an engine that keep their weights as they are loaded."""

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    convert_to_unquantized_kernel_format,
)

from sharding.worker.cpu import PlainExperts
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
    plain = with_method("UnquantizedFusedMoEMethod", unquantized_backend=backends.CPU, experts_cls=PlainExperts)
    assert reprocessed_modules(nn.ModuleList([plain]), plain_on_cpu=True) == []


def test_quantised_modules_are_reloaded() -> None:
    quantised = with_method("Fp8LinearMethod")
    assert reprocessed_modules(nn.ModuleList([quantised]), plain_on_cpu=True) == [quantised]
