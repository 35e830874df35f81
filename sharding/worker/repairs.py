"""Repairs of vLLM 0.32 in a worker, on CPUs and on GPUs, before it builds its model."""

from collections.abc import Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_BIAS = "e_score_correction_bias"


def load_biases_of_experts() -> None:
    """Load the correction bias that checkpoints of Laguna store among the experts.

    vLLM keeps it there, too, but its loader of experts skips every other weight.
    """
    load_experts = RoutedExperts.load_weights

    @wraps(load_experts)
    def load(layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        loaded: list[str] = []

        def experts() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if name != _BIAS:
                    yield name, weight
                    continue
                bias = getattr(layer, _BIAS)
                getattr(bias, "weight_loader", default_weight_loader)(bias, weight)
                loaded.append(name)

        yield from load_experts(layer, experts())
        yield from loaded

    RoutedExperts.load_weights = load  # type: ignore[method-assign]


def keep_scalars_of_xielu() -> None:
    """Keep the scalars of Apertus' activation in the model's dtype.

    In bfloat16, in which vLLM keeps them always, a model in float32 is 8e-4 nats from Transformers.
    """
    build = XIELU.__init__

    @wraps(build)
    def with_dtype(layer: XIELU, *arguments: Any, **options: Any) -> None:
        build(layer, *arguments, **{"dtype": torch.get_default_dtype()} | options)

    XIELU.__init__ = with_dtype  # type: ignore[method-assign]


def keep_bias_of_head() -> None:
    """Keep the head's bias, which vLLM's models by Transformers' code (Phi) replace at every
    load.
    """
    register = ParallelLMHead._register_bias

    @wraps(register)
    def register_once(head: ParallelLMHead) -> None:
        if getattr(head, "bias", None) is None:
            register(head)

    ParallelLMHead._register_bias = register_once  # type: ignore[method-assign]
