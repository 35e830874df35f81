"""The table of the largest models that train on 80 GB GPUs, by the plan's memory, for docs/memory-and-scale.md.

PYTHONPATH=. python tests/support/largest_models.py
"""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from trainer.config.schema import TrainConfig
from trainer.estimates.memory import COLUMNS, GIB, TIGHT, engine_parts, trainer_parts
from trainer.estimates.model_sizes import ModelSizes, model_sizes

DEVICE_GIB = 79.0  # of an H100 of 80 GB


def dense(hidden: int, width: int, layers: int, heads: int, kv_heads: int) -> PretrainedConfig:
    """Return a config of Qwen2.5 (arXiv:2412.15115, table 1)."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=152064,
        tie_word_embeddings=layers == 36,
    )


MODELS = {
    "3B": dense(2048, 11008, 36, 16, 2),
    "7B": dense(3584, 18944, 28, 28, 4),
    "14B": dense(5120, 13824, 48, 40, 8),
    "32B": dense(5120, 27648, 64, 40, 8),
    "72B": dense(8192, 29568, 80, 64, 8),
}
MIXTURE = Qwen3MoeConfig(  # Qwen3-30B-A3B (arXiv:2505.09388, table 2)
    architectures=["Qwen3MoeForCausalLM"],
    hidden_size=2048,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
    tie_word_embeddings=False,
)
KEYS: dict[str, dict[str, Any]] = {
    "none of these": {},
    "`policy.offload: all`": {"policy": {"offload": "all"}},
    "`policy.update_on: host`": {"policy": {"update_on": "host"}},
    "the same, `sync.way: zero_copy`": {"policy": {"update_on": "host"}, "sync": {"way": "zero_copy"}},
}


def recipe(folder: Path, ranks: int, keys: dict[str, dict[str, Any]]) -> TrainConfig:
    """Answer of 3,072 tokens to prompts of 1,024, micro-batches of 16,384 tokens, engines over all GPUs."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"device": "cuda"},
        "model": {"path": str(folder)},
        "data": {"path": "d", "max_prompt_tokens": 1024},
        "sampling": {"max_tokens": 3072},
        "batch": {"prompts_per_step": 64, "tokens_per_micro_batch": 16384},
        "algorithm": {"group_size": 8},
        "engine": {"max_model_len": 4096, "tensor_parallel_size": min(ranks, 4), "kv_cache_gib": 8},
        "policy": {"activation_checkpointing": "full"},
        "sync": {"way": "staged"},
    }
    return TrainConfig.model_validate(
        sections | {name: sections[name] | values for name, values in keys.items()}
    )


def needed(config: TrainConfig, model: ModelSizes, ranks: int) -> list[float]:
    """GiB of a device while the run starts, while answers are generated, and while the policy is updated."""
    parts = [
        *trainer_parts(config, model, ranks, DEVICE_GIB),
        *engine_parts(config, model, ranks, DEVICE_GIB),
    ]
    return [sum(getattr(part, column) for part in parts) / GIB for column in COLUMNS]


def table() -> str:
    """Return the rows: for each number of GPUs and each set of keys the largest dense model, and whether the mixture fits."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in [*MODELS, "mixture"]}
        for name, place in places.items():
            (MIXTURE if name == "mixture" else MODELS[name]).save_pretrained(place)
        sizes = {name: model_sizes(recipe(place, 1, {}), str(place)) for name, place in places.items()}
        for ranks in (1, 2, 8):
            for title, keys in KEYS.items():
                if ranks > 1 and "sync" in keys:  # shares the weights of one rank
                    continue
                every = {
                    name: needed(recipe(place, ranks, keys), sizes[name], ranks)
                    for name, place in places.items()
                }
                fits = {
                    name: columns
                    for name, columns in every.items()
                    if max(columns) <= TIGHT * DEVICE_GIB
                }
                largest = [name for name in MODELS if name in fits][-1]
                # Bytes a parameter in host memory.
                away = 16 if "update_on" in keys.get("policy", {}) else 12 if "policy" in keys else 0
                host = f"{away * sizes[largest].total / 1e9:.0f} GB" if away else "–"
                mixture = "yes" if "mixture" in fits else "no"
                device = ", ".join(f"{gib:.0f}" for gib in fits[largest])
                rows.append(f"| {ranks} | {title} | {largest} | {device} | {host} | {mixture} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
