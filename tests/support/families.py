"""Tiny checkpoints of model families, from Transformers' own classes.

    make_family("granite4", folder)

`FAMILIES` has the settings by which a family's configuration differs from `BASE`. The weights are random, and larger
than Transformers starts them with, so that an error in one of them shows. The tokenizer is that of `tiny_model`, with a
processor for images in families of `scripts.tiny_vlm`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from scripts import tiny_vlm
from trainer.commands.tiny_model import make_tokenizer, token_ids
from trainer.policy.hf_format import model_kind

Settings = dict[str, Any]

BASE: Settings = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
# vLLM's gated delta rule on CPU knows heads of 128, but not of 32.
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
_DELTA |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
# vLLM's latent attention on CPU knows one size, 512 and 64.
_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_LATENT |= {"num_key_value_heads": 4, "head_dim": 64}
_DEEPSEEK = (
    _LATENT | _ROUTED | {"rope_parameters": _YARN, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
)
_INDEXED = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
_GRANITE = _MAMBA | {
    "layer_types": ["mamba", "attention"],
    "mamba_expand": 2,
    "position_embedding_type": "nope",
}
_GRANITE |= {"shared_intermediate_size": 256}
_FALCON = _MAMBA | {"mamba_d_ssm": 256}
# vLLM reads keys of its own, which the released configurations have beside those that Transformers reads.
_MIMO = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "v_head_dim": 32}
_MIMO |= {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
}
_MIMO |= {
    "sliding_window": 64,
    "sliding_window_size": 64,
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
}
_MIMO |= {"add_swa_attention_sink_bias": True, "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334}
_MIMO |= {"rope_theta": 5e6, "swa_rope_theta": 1e4}
# vLLM computes logits from the embedding, whatever the configuration says
_TIED = {"tie_word_embeddings": True}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, Settings]] = {
    "afmoe": (
        "afmoe",
        _EXPERTS | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", _TIED | {"sliding_window": 64, "logit_scale": 0.25}),
    "cohere2_moe": ("cohere2_moe", _EXPERTS | _TIED),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK | {"topk_method": "greedy", "scoring_func": "softmax"}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v32": ("deepseek_v32", _DEEPSEEK | _INDEXED),
    "deepseek_v4": (
        "deepseek_v4",
        _ROUTED
        | {"num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 48}
        | {"o_groups": 2, "o_lora_rank": 32, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
        | {"mlp_layer_types": ["moe", "moe"], "intermediate_size": 64},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
        | {"moe_intermediate_size": 64, "moe_layer_start_index": 1},
    ),
    "exaone4": ("exaone4", {"sliding_window": 64}),
    "falcon_h1": ("falcon_h1", _FALCON),
    "falcon_h1_mup": ("falcon_h1", _FALCON | {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "gemma2": ("gemma2", _TIED | {"query_pre_attn_scalar": 32, "sliding_window": 64}),
    "gemma3": ("gemma3_text", _TIED | {"query_pre_attn_scalar": 32, "sliding_window": 64}),
    "gemma3n": (
        "gemma3n_text",
        _SLIDING
        | _TIED
        | {"vocab_size_per_layer_input": 288}
        | {"hidden_size_per_layer_input": 32}
        | {"num_kv_shared_layers": 0, "intermediate_size": [256, 256], "laurel_rank": 16}
        | {"activation_sparsity_pattern": [0.0, 0.0]},
    ),
    "gemma4": (
        "gemma4_text",
        _SLIDING
        | _TIED
        | {"global_head_dim": 64, "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "sliding_window": 64, "vocab_size_per_layer_input": 288},
    ),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", _ROUTED),
    "glm4_moe_lite": ("glm4_moe_lite", _DEEPSEEK),
    "glm5_next": (
        "glm5_next_text",
        _LATENT
        | _ROUTED
        | _INDEXED
        | {"qk_rope_head_dim": 0, "linear_num_heads": 4}
        | {"linear_head_dim": 32, "layer_types": ["linear_attention", "indexed_attention"]}
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", _DEEPSEEK | _INDEXED),
    "gpt_oss": ("gpt_oss", _LOCAL_EXPERTS | _SLIDING | {"sliding_window": 32}),
    "granite3": (
        "granite",
        {"logits_scaling": 8.0, "embedding_multiplier": 4.0, "residual_multiplier": 0.5}
        | {"attention_multiplier": 0.1},
    ),
    "granite4": ("granitemoehybrid", _GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0}),
    "granite4_moe": ("granitemoehybrid", _GRANITE | _LOCAL_EXPERTS | {"logits_scaling": 4.0}),
    "granite_swa": ("granite_swa", {}),
    "hunyuan_dense": ("hunyuan_v1_dense", {}),
    "hy_v3": (
        "hy_v3",
        _EXPERTS
        | {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True}
        | {"qk_norm": True},
    ),
    "jamba": (
        "jamba",
        {"num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1}
        | {
            "expert_layer_period": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | {"q_lora_rank": None, "moe_intermediate_size": 64, "n_group": 1}
        | _LOCAL_EXPERTS
        | {"linear_head_dim": 32, "linear_num_heads": 4, "topk_group": 1}
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "laguna": ("laguna", _EXPERTS),
    "lfm2": (
        "lfm2",
        {"block_multiple_of": 64, "layer_types": ["conv", "full_attention"]}
        | {"conv_dim": 128, "block_dim": 128}
        | _TIED,
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1} | _TIED,
    ),
    "llama": ("llama", {}),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 256}
        | {"interleave_moe_layer_step": 1, "attention_chunk_size": 128},
    ),
    "longcat_flash": (
        "longcat_flash",
        _LATENT
        | {"ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, "moe_topk": 2}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "zero_expert_type": "identity"}
        | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", _MIMO),
    "minicpm3": ("minicpm3", {"num_key_value_heads": 4}),
    "minimax_m2": (
        "minimax_m2",
        _LOCAL_EXPERTS | {"rotary_dim": 32, "scoring_func": "sigmoid"} | {"use_routing_bias": True},
    ),
    "ministral3": ("ministral3", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", _LOCAL_EXPERTS),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3}
        | {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
        | {"conv_kernel": 4, "chunk_size": 16},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 64}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "olmoe": ("olmoe", _EXPERTS),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_next": (
        "qwen3_next",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        _DELTA
        | _EXPERTS
        | {"layer_types": ["linear_attention", "indexed_attention"]}
        | {"shared_expert_intermediate_size": 64, "hc_lowrank": 16, "indexer_n_heads": 4}
        | {
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "zamba2": (
        "zamba2",
        _TIED
        | {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 64, "mamba_d_state": 16}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "chunk_size": 16},
    ),
    # Vision-language classes, whose model_type is a name in `scripts.tiny_vlm.ARCHITECTURES`.
    "gemma3_vl": ("gemma3", _TIED),
    "gemma4_vl": ("gemma4", _TIED),
    "gemma4_unified_vl": ("gemma4_unified", _TIED),
    "kimi_k25_vl": ("kimi_k25", {}),
    "ministral3_vl": ("mistral3", {}),
    "qwen3_5_vl": ("qwen3_5", {}),
    "qwen3_5_moe_vl": ("qwen3_5_moe", _EXPERTS | {"shared_expert_intermediate_size": 64}),
}
"""Family -> the `model_type` of its configuration, and the settings that `BASE` lacks or has otherwise."""

_SPREAD = 0.08  # standard deviation of the matrices
_MOST_PARAMETERS = 30_000_000


def make_family(family: str, folder: Path) -> PreTrainedModel:
    """Write a tiny checkpoint of a family to `folder`, and return its model in float32.

    Raises whatever Transformers raises if it cannot make one from these settings, and ValueError if it is not tiny.
    """
    model_type, settings = FAMILIES[family]
    config, processor = _config_and_processor(model_type, BASE | settings)
    kind = model_kind(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("meta"):
            elements = sum(p.numel() for p in kind.from_config(config).parameters())
        if elements > _MOST_PARAMETERS:
            raise ValueError(f"{family} has {elements} parameters with these settings")
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        for module in model.modules():
            _spread(module)
    model.generation_config = GenerationConfig(**token_ids(getattr(processor, "tokenizer", processor)))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if model_type in tiny_vlm.WITH_LEVEL:
        tiny_vlm.add_level(folder / "model.safetensors")
    return model.eval()


def _config_and_processor(model_type: str, settings: Settings) -> tuple[PretrainedConfig, Any]:
    """Return the configuration of a model, and its tokenizer, or its processor if it takes images."""
    if model_type not in tiny_vlm.ARCHITECTURES:
        tokenizer = make_tokenizer()
        return CONFIG_MAPPING[model_type](**(settings | token_ids(tokenizer))), tokenizer
    tokenizer = tiny_vlm.vision_tokenizer(model_type)
    vision = tiny_vlm.vision_settings(settings["hidden_size"])
    return tiny_vlm.ARCHITECTURES[model_type](tokenizer, settings | token_ids(tokenizer), vision, 2)


@torch.no_grad()
def _spread(module: nn.Module) -> None:
    """Widens matrices, gives biases of routers values, and makes recurrent states decay slowly."""
    for name, parameter in module.named_parameters(recurse=False):
        spread = parameter.std().item() if parameter.numel() > 1 else 0.0
        if parameter.ndim >= 2 and not isinstance(module, nn.Conv1d) and 0 < spread < _SPREAD / 2:
            parameter.mul_(_SPREAD / spread)
        elif name == "A_log":
            # exp(A_log) is the decay per unit of time: a fast one would hide what crosses a border
            parameter.uniform_(-4.0, -2.0)
    for name, buffer in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
        if name in ("e_score_correction_bias", "expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()).view(buffer.shape))
