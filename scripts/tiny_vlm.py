"""Makes tiny vision-language models with processor, tokenizer and chat template, as `tiny_model` makes text models.

Processors need torchvision: call `hotbunk_torchvision.show()` before Transformers is first imported.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from trainer.commands.tiny_model import CHAT_TEMPLATE, make_tokenizer, text_settings, token_ids

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_MARK_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
PLACEHOLDERS = {"gemma3": "<|vision_start|>", "llava": "<|image_pad|>"}
"""The placeholder for an image in chat templates, where it is not an <|image_pad|> between the vision marks."""

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
    """Returns `tiny_model.CHAT_TEMPLATE`, changed for messages whose content may also be a list of parts."""
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
    """Writes model, processor and generation config to `folder`, and returns it.

    `architecture` is one of `ARCHITECTURES`. Qwen's images have up to `largest_image`² tokens of 28 x 28 pixels (32 x
    32 for Qwen3-VL); Gemma's and LLaVA's always as many as 56 x 56 pixels have.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template = chat_template(architecture)
    heads, kv_heads = hidden_size // 32, max(1, hidden_size // 64)  # vLLM's attention on CPU refuses heads of 16
    text = text_settings(tokenizer, hidden_size, layers, heads, kv_heads, tied)
    text |= {"vocab_size": len(tokenizer) + 10, "intermediate_size": 2 * hidden_size}
    vision = {"hidden_size": vision_size, "intermediate_size": 2 * vision_size, "patch_size": _PATCH}
    vision |= {"num_heads": 2, "depth": vision_layers, "out_hidden_size": hidden_size}
    config, processor = ARCHITECTURES[architecture](tokenizer, text, vision, largest_image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**token_ids(tokenizer))
    model.save_pretrained(folder)
    # On the hub, encoders' weights have other names than in Transformers 5, whose names vLLM 0.32 does not know.
    file = folder / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return folder


ConfigAndProcessor = tuple[PretrainedConfig, Any]


def _qwen_vl(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int, *, family: str, videos: str
) -> ConfigAndProcessor:
    """Makes Qwen2.5-VL or Qwen3-VL; `family` and `videos` are the first words of the names of its classes."""
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    if family == "Qwen3VL":
        rope |= {"mrope_interleaved": True}
        patch, extra = 16, {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        patch, extra = _PATCH, {"window_size": 112, "fullatt_block_indexes": [vision["depth"] - 1]}
    extra |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": patch}
    config = getattr(transformers, f"{family}Config")(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | extra,
        tie_word_embeddings=text["tie_word_embeddings"],
        **dict(zip(_MARK_IDS, tokenizer.convert_tokens_to_ids(MARKS), strict=True)),
    )
    side = 2 * patch
    size = {"shortest_edge": side**2, "longest_edge": (largest * side) ** 2}
    images = transformers.Qwen2VLImageProcessor(patch_size=patch, size=size)
    parts = images, tokenizer, getattr(transformers, f"{videos}VideoProcessor")()
    return config, getattr(transformers, f"{family}Processor")(*parts, chat_template=tokenizer.chat_template)


def _gemma3(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> ConfigAndProcessor:
    begin, end, image, _ = tokenizer.convert_tokens_to_ids(MARKS)
    names = zip(("boi_token", "eoi_token", "image_token"), MARKS, strict=False)
    tokenizer._set_model_specific_special_tokens(dict(names))
    extra = {"image_size": 56, "num_attention_heads": 2, "num_hidden_layers": vision["depth"]}
    config = transformers.Gemma3Config(
        text_config=text | {"query_pre_attn_scalar": 32, "sliding_window": 64},
        vision_config={k: vision[k] for k in ("hidden_size", "intermediate_size", "patch_size")} | extra,
        mm_tokens_per_image=4,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=image,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    template = tokenizer.chat_template
    return config, transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _llava(tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int) -> ConfigAndProcessor:
    extra = {"image_size": 56, "num_attention_heads": 2, "num_hidden_layers": vision["depth"] + 1, "projection_dim": 32}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **{k: vision[k] for k in ("hidden_size", "intermediate_size", "patch_size")} | extra
        ),
        text_config=transformers.LlamaConfig(**text),
        image_token_id=tokenizer.convert_tokens_to_ids(MARKS[2]),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARKS[2],
        chat_template=tokenizer.chat_template,
    )
    return config, processor


ARCHITECTURES: dict[str, Callable[[PreTrainedTokenizerFast, Any, Any, int], ConfigAndProcessor]] = {
    "qwen2_5_vl": partial(_qwen_vl, family="Qwen2_5_VL", videos="Qwen2VL"),
    "qwen3_vl": partial(_qwen_vl, family="Qwen3VL", videos="Qwen3VL"),
    "gemma3": _gemma3,
    "llava": _llava,
}
