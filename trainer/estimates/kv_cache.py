"""The KV cache that tokens and answers take on an engine's ranks."""

import math

import torch

from generation.engine.settings import kv_elements
from trainer.config.model_file import RECURRENT_LAYERS
from trainer.config.schema import TrainConfig
from trainer.estimates.model_sizes import (
    ModelSizes,
)


def engine_dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of an engine's weights and of its KV cache."""
    return getattr(torch, config.engine.dtype or config.policy.dtype)


def kv_answer_bytes(config: TrainConfig, model: ModelSizes, tokens: float) -> float:
    """Return bytes of an answer, with its prompt `tokens` long, in the KV cache of each rank of an
    engine.

    A layer with a sliding window keeps as many tokens, a recurrent one a state. That is counted for
    gated delta rules (`gated_delta_net_state_shape` in
    vllm/model_executor/layers/mamba/mamba_utils.py); other states are small.
    """
    sizes = model.config
    kinds = sizes.get("layer_types") or ["full_attention"] * model.layers
    held = {
        "sliding_attention": min(tokens, sizes.get("sliding_window") or tokens),
        **dict.fromkeys(RECURRENT_LAYERS, 0),
    }
    size = kv_token_bytes(config, model) / model.layers * sum(held.get(kind, tokens) for kind in kinds)
    states = kinds.count("linear_attention")
    if states and sizes.get("linear_key_head_dim"):
        keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
        values = sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"]
        width = engine_dtype(config).itemsize
        dtype = sizes.get("mamba_ssm_dtype")
        state = (
            (getattr(torch, dtype).itemsize if dtype else width) * values * sizes["linear_key_head_dim"]
        )
        state += width * (sizes["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
        size += states * state / config.engine.tensor_parallel_size
    return size


def kv_token_bytes(config: TrainConfig, model: ModelSizes) -> int:
    """Return bytes of a token in the KV cache of each rank of an engine, if all layers attend to
    all tokens.

    With more ranks than heads, ranks hold copies.
    """
    latent = model.config.get("kv_lora_rank")
    heads = (
        1 if latent else model.config.get("num_key_value_heads") or model.config["num_attention_heads"]
    )
    held = math.ceil(heads / config.engine.tensor_parallel_size)
    return kv_elements(model.config) // heads * held * engine_dtype(config).itemsize
