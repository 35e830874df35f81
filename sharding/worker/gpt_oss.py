"""Weights of gpt-oss, whose `load_weights` in vLLM writes fused experts and sinks past the loaders
of their parameters (vllm/model_executor/models/gpt_oss.py, _load_weights_other), so that a reload
and a record would not see them.
"""

import re
from collections.abc import Iterator

import torch
from torch.nn import Module
from vllm.distributed import get_tensor_model_parallel_rank

from generation.engine.vllm_differences import takes_own_heads
from sharding.wire.manifest import NamedTensors


def has_own_loop(model: Module) -> bool:
    """Return True if a model loads its weights as gpt-oss does."""
    return hasattr(getattr(model, "model", None), "_try_load_streamed_expert")


def through_loaders(model: Module, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights for `load_weights` so that each passes the loader of its parameter.
    Fused experts go one by one, and sinks are loaded here.
    """
    for name, weight in weights:
        if fused := re.fullmatch(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?", name):
            matrix = "w13" if fused[2] == "gate_up" else "w2"
            ending = fused[3] or "_weight"
            for number, expert in enumerate(weight):
                yield f"{fused[1]}.{number}.{matrix}{ending}", expert
        elif (
            name.endswith(".sinks")
            and (sinks := model.get_parameter(name.replace(".self_attn.", ".attn."))).is_meta
        ):
            if not takes_own_heads(sinks):
                shares = weight.chunk(weight.numel() // sinks.numel())
                weight = shares[get_tensor_model_parallel_rank()]
            sinks.weight_loader(sinks, weight)  # type: ignore[attr-defined]
        else:
            yield name, weight
