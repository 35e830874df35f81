"""Recipes for released models, their table for docs/memory-and-scale.md, and the models' config.json.

PYTHONPATH=. python tests/support/released_models.py          # the table

No hub is at hand, so each config.json is written from published figures:

    write_config("Qwen/Qwen3-4B", folder)

A config.json has what differs from the defaults of Transformers' class and bears on a plan. The recipes name their
sources; the defaults of Transformers' classes of Qwen3.5 and gpt-oss are those of Qwen3.5-9B and gpt-oss-120b.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING

from trainer.cli import main
from trainer.config.schema import ModelConfig
from trainer.policy.hf_format import build_meta_model, checkpoint_views, parameter_names

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"

Settings = dict[str, Any]


def _text(hidden: int, width: int, layers: int, heads: int, kv_heads: int, **further: Any) -> Settings:
    """Return the sizes of a language model, by the keys that these families have for them."""
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | further


def _gemma(**text: Any) -> Settings:
    """Return a Gemma 3 with the encoder that all of its sizes have."""
    encoder = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
    }
    encoder |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}
    return {"text_config": text | {"sliding_window": 1024}, "vision_config": encoder}


_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072}
_SMALL_ENCODER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}

CONFIGS: dict[str, tuple[str, str, Settings]] = {
    "Qwen/Qwen3-4B": (
        "qwen3",
        "Qwen3ForCausalLM",
        _text(2560, 9728, 36, 32, 8, tie_word_embeddings=True, max_position_embeddings=40960),
    ),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _text(2048, 6144, 48, 32, 4, head_dim=128, max_position_embeddings=40960),
    ),
    "Qwen/Qwen3.5-9B": (
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {"text_config": {"mamba_ssm_dtype": "float32"}, "vision_config": {"out_hidden_size": 4096}},
    ),
    "Qwen/Qwen3.5-27B": (
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": _text(
                5120, 17408, 64, 24, 4, linear_num_value_heads=48, mamba_ssm_dtype="float32"
            ),
            "vision_config": {"out_hidden_size": 5120},
        },
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": _text(2560, 9728, 36, 32, 8),
            "tie_word_embeddings": True,
            "vision_config": _SMALL_ENCODER | {"out_hidden_size": 2560},
        },
    ),
    "Qwen/Qwen3-VL-8B-Instruct": (
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        {"text_config": _text(4096, 12288, 36, 32, 8), "vision_config": {"out_hidden_size": 4096}},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        "LlamaForCausalLM",
        _text(4096, 14336, 32, 32, 8, **_LLAMA),
    ),
    "meta-llama/Llama-3.1-70B-Instruct": (
        "llama",
        "LlamaForCausalLM",
        _text(8192, 28672, 80, 64, 8, **_LLAMA),
    ),
    "google/gemma-3-4b-it": (
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _gemma(**_text(2560, 10240, 34, 8, 4)),
    ),
    "google/gemma-3-27b-it": (
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _gemma(**_text(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168)),
    ),
    "unsloth/gpt-oss-20b-BF16": (
        "gpt_oss",
        "GptOssForCausalLM",
        {"num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "unsloth/gpt-oss-120b-BF16": ("gpt_oss", "GptOssForCausalLM", {}),
}
"""Name on the hub -> the `model_type` of its config.json, its class, and further keys."""

PARAMETERS = {
    "Qwen/Qwen3-4B": "4.0",
    "Qwen/Qwen3-30B-A3B": "30.5",
    "Qwen/Qwen3.5-9B": "9.41",
    "Qwen/Qwen3.5-27B": "27",
    "Qwen/Qwen3-VL-4B-Instruct": "4",
    "Qwen/Qwen3-VL-8B-Instruct": "9",
    "meta-llama/Llama-3.1-8B-Instruct": "8.0",
    "meta-llama/Llama-3.1-70B-Instruct": "70.6",
    "google/gemma-3-4b-it": "4.3",
    "google/gemma-3-27b-it": "27.4",
    "unsloth/gpt-oss-20b-BF16": "20.9",
    "unsloth/gpt-oss-120b-BF16": "116.8",
}
"""Published billions of parameters, all that the text or the card gives of its digits. The checkpoint of Qwen3.5-9B has
9.65, of which 0.24 predict a second token and are not part of Transformers' class."""


def write_config(name: str, folder: Path, **changes: Any) -> Path:
    """Write a model's config.json to `folder`, with other values for some keys of a text model; return the folder."""
    model_type, kind, settings = CONFIGS[name]
    CONFIG_MAPPING[model_type](architectures=[kind], **settings | changes).save_pretrained(folder)
    return folder


def write_weights(folder: Path) -> None:
    """Write weights with the shapes of the model in `folder`, all zeros, to a file that takes no space on the disk."""
    model = build_meta_model(folder, ModelConfig(path=str(folder)), torch.bfloat16, torch.device("cpu"))
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in parameter_names(model).items():
        for view in checkpoint_views(model, name, parameter.shape):
            begin, end = end, end + 2 * math.prod(view.shape)
            header[view.name] = {
                "dtype": "BF16",
                "shape": list(view.shape),
                "data_offsets": [begin, end],
            }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def recipes() -> Iterator[tuple[Path, str, int]]:
    """Yield the recipes for these models, with the model's name and the number of GPUs in the file's name."""
    for file in sorted(RECIPES.glob("*gpu.yaml")):
        name, count = (
            yaml.safe_load(file.read_text())["model"]["path"],
            re.search(r"_(\d+)gpu$", file.stem),
        )
        if name in CONFIGS:
            assert count is not None
            yield file, name, int(count[1])


def plan(recipe: Path, name: str, gpus: int, folder: Path, **changes: Any) -> dict[str, list[str]]:
    """Return the lines that `hotbunk plan` prints for a recipe: a line's first cell, and the others.

    `changes` are those of `write_config`. Raises AssertionError, with what was printed, if the plan does not fit.
    """
    output, model = StringIO(), write_config(name, folder, **changes)
    with redirect_stdout(output):
        words = [str(recipe), "--ranks", str(gpus), "--gpu", "h100", "--model.path", str(model)]
        assert main(["plan", *words]) == 0, output.getvalue()
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.getvalue().splitlines()
    ]
    title = re.search(r"([\d,]+) parameters", output.getvalue())
    assert title is not None
    return {first: rest for first, *rest in rows} | {"parameters": [title[1].replace(",", "")]}


def sizes(cells: dict[str, list[str]], name: str) -> list[float]:
    """Return a line's GiB while the run starts, while answers are generated and in an update, from what `plan` returned."""
    columns = cells.get(name, ["", "", ""])[:3]
    return [float(gib or 0) for gib in columns]


def row(recipe: Path, gpus: int, cells: dict[str, list[str]]) -> str:
    """Return a recipe's row of the table, from what `plan` returned."""
    config = yaml.safe_load(recipe.read_text())
    policy = config["policy"]
    keys = [
        f"`{key}: {policy[key]}`" for key in ("update_on", "offload", "expert_parallel") if key in policy
    ]
    trained = f"adapters of rank {config['lora']['rank']}" if "lora" in config else "all weights"
    device, host = (sizes(cells, name) for name in ("sum", "host memory"))
    answers = re.search(r"(\d+) answers", cells["engine: KV cache"][3])
    assert answers is not None
    columns = [
        f"`{recipe.stem}`",
        ", ".join([trained, *keys]),
        ", ".join(f"{gib:.0f}" for gib in device),
        f"{gpus * max(host):.0f}" if max(host) else "–",
        f"{gpus // config['engine'].get('tensor_parallel_size', 1)} × {answers[1]}",
        f"{float(cells['step'][0]):.0f}",
    ]
    return f"| {' | '.join(columns)} |"


def table() -> str:
    """Return the rows of all recipes, each by the command."""
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join(
            row(file, gpus, plan(file, name, gpus, Path(folder) / name))
            for file, name, gpus in recipes()
        )


if __name__ == "__main__":
    print(table())
