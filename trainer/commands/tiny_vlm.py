"""Tiny vision-language models with processor, tokenizer and chat template, made as `tiny_model` makes those of text.

Processors need torchvision: `hotbunk_torchvision.show()` comes before the first import of Transformers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from trainer.commands.tiny_model import CHAT_TEMPLATE, make_tokenizer

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PLACEHOLDERS = {"gemma3": "<|vision_start|>", "llava": "<|image_pad|>"}
"""What a chat template writes for an image, where that is not an <|image_pad|> between the vision marks."""

_PARTS = """\
{%- macro show(content) %}
    {%- if content is string or not content %}{{- content or '' }}
    {%- else %}
        {%- for part in content %}{{- part.text if part.type == 'text' else 'PLACEHOLDER' }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
"""

_PATCH = 14


def chat_template(architecture: str) -> str:
    """`tiny_model.CHAT_TEMPLATE` for messages whose content may also be a list of parts."""
    placeholder = PLACEHOLDERS.get(architecture, "<|vision_start|><|image_pad|><|vision_end|>")
    plain = CHAT_TEMPLATE.replace("message.content or ''", "show(message.content)")
    plain = plain.replace("'<tool_response>' + message.content +", "'<tool_response>' + show(message.content) +")
    return _PARTS.replace("PLACEHOLDER", placeholder) + plain


def make_tiny_vlm(
    folder: Path | str,
    *,
    architecture: str = "qwen2_5_vl",
    hidden_size: int = 128,
    layers: int = 2,
    vision_layers: int = 2,
    vision_size: int = 64,
    largest_image: int = 4,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """Write model, processor and generation config to `folder`, and return it.

    `architecture` is one of `ARCHITECTURES`. Qwen's images have up to `largest_image`² tokens of 28 x 28 pixels (32 x
    32 for Qwen3-VL); Gemma's and LLaVA's always as many as 56 x 56 pixels have.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template = chat_template(architecture)
    text = {
        "vocab_size": len(tokenizer) + 10,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,  # vLLM's attention on CPU refuses heads of 16
        "num_key_value_heads": max(1, hidden_size // 64),
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": hidden_size**-0.5,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {"hidden_size": vision_size, "intermediate_size": 2 * vision_size, "patch_size": _PATCH}
    vision |= {"num_heads": 2, "depth": vision_layers, "out_hidden_size": hidden_size}
    config, processor = ARCHITECTURES[architecture](tokenizer, text, vision, largest_image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**{name: text[name] for name in text if name.endswith("_token_id")})
    model.save_pretrained(folder)
    _with_hub_names(folder / "model.safetensors")
    processor.save_pretrained(folder)
    return folder


def _with_hub_names(file: Path) -> None:
    """Name the weights of encoders as checkpoints on the hub do: vLLM 0.32 does not know Transformers 5's names."""
    weights = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


Made = tuple[PretrainedConfig, Any]


def _marks(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"]
    return dict(zip(names, tokenizer.convert_tokens_to_ids(MARKS), strict=True))


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> Made:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    windows = {"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | windows | {"fullatt_block_indexes": [vision["depth"] - 1]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **_marks(tokenizer),
    )
    side = 2 * _PATCH
    images = transformers.Qwen2VLImageProcessor(min_pixels=side**2, max_pixels=(largest * side) ** 2)
    videos = transformers.Qwen2VLVideoProcessor()
    made = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    return config, made


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> Made:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10000.0}
    shape = {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 16, "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | shape | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **_marks(tokenizer),
    )
    size = {"shortest_edge": 32**2, "longest_edge": (largest * 32) ** 2}
    images = transformers.Qwen2VLImageProcessor(patch_size=16, size=size)
    videos = transformers.Qwen3VLVideoProcessor()
    made = transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    return config, made


def _gemma3(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> Made:
    marks = _marks(tokenizer)
    names = zip(("boi_token", "eoi_token", "image_token"), MARKS, strict=False)
    tokenizer._set_model_specific_special_tokens(dict(names))
    own = {"image_size": 56, "num_attention_heads": 2, "num_hidden_layers": vision["depth"]}
    config = transformers.Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 32, "sliding_window": 64},
        vision_config={k: vision[k] for k in ("hidden_size", "intermediate_size", "patch_size")} | own,
        mm_tokens_per_image=4,
        boi_token_index=marks["vision_start_token_id"],
        eoi_token_index=marks["vision_end_token_id"],
        image_token_index=marks["image_token_id"],
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    made = transformers.Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    return config, made


def _llava(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> Made:
    own = {"image_size": 56, "num_attention_heads": 2, "num_hidden_layers": vision["depth"] + 1, "projection_dim": 32}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **{k: vision[k] for k in ("hidden_size", "intermediate_size", "patch_size")} | own
        ),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=_marks(tokenizer)["image_token_id"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    made = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARKS[2],
        chat_template=tokenizer.chat_template,
    )
    return config, made


ARCHITECTURES: dict[str, Callable[[PreTrainedTokenizerFast, Any, Any, int], Made]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "llava": _llava,
}
