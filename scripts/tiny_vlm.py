"""Make tiny vision-language models with processor, tokenizer and chat template, as `tiny_model` makes text models."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from trainer.commands.tiny_model import (
    CHAT_TEMPLATE,
    make_tokenizer,
    special_settings,
    text_settings,
    token_ids,
)
from trainer.surroundings import follow_umask

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_MARK_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
PLACEHOLDERS = {
    "gemma3": "<|vision_start|>",
    **dict.fromkeys(("gemma4", "gemma4_unified", "llava", "mistral3"), "<|image_pad|>"),
}
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

WITH_LEVEL = ("gemma3", "llava")
"""Architectures whose encoders' weights have a level `vision_model` in their names on the hub, as vLLM 0.32 wants."""


def chat_template(architecture: str) -> str:
    """Return `tiny_model.CHAT_TEMPLATE`, changed for messages whose content may also be a list of parts."""
    placeholder = PLACEHOLDERS.get(architecture, "<|vision_start|><|image_pad|><|vision_end|>")
    plain = CHAT_TEMPLATE.replace("message.content or ''", "show(message.content)")
    plain = plain.replace(
        "'<tool_response>' + message.content +", "'<tool_response>' + show(message.content) +"
    )
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

    `architecture` is one of `ARCHITECTURES`. Qwen's and Mistral's images have up to `largest_image`² tokens of 28 x 28
    pixels (32 x 32 for Qwen3-VL and Qwen3.5); Gemma 3's and LLaVA's always as many as 56 x 56 pixels have; Gemma 4's
    are enlarged to about 70.
    """
    folder = Path(folder)
    tokenizer = vision_tokenizer(architecture)
    # vLLM's attention on CPU refuses heads of 16
    heads, kv_heads = hidden_size // 32, max(1, hidden_size // 64)
    text = text_settings(tokenizer, hidden_size, layers, heads, kv_heads, tied)
    text |= {"vocab_size": len(tokenizer) + 10, "intermediate_size": 2 * hidden_size}
    vision = vision_settings(hidden_size, vision_layers, vision_size)
    config, processor = ARCHITECTURES[architecture](tokenizer, text, vision, largest_image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                # Gemma 3's projection, without which images are all alike
                torch.nn.init.normal_(parameter, std=hidden_size**-0.5)
    model.generation_config = GenerationConfig(**token_ids(tokenizer))
    model.save_pretrained(folder)
    if architecture in WITH_LEVEL:
        add_level(folder / "model.safetensors")
    follow_umask(folder)
    processor.save_pretrained(folder)
    return folder


def add_level(file: Path) -> None:
    """Give an encoder's weights the level `vision_model` in their names."""
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): w
        for name, w in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def vision_tokenizer(architecture: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer of `tiny_model`, with the marks of images and a template for them."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer.chat_template = chat_template(architecture)
    return tokenizer


def vision_settings(hidden_size: int, layers: int = 2, size: int = 64) -> dict[str, Any]:
    """Return the settings of an encoder beside a language model of `hidden_size`, by the names that Qwen gives them."""
    vision = {"hidden_size": size, "intermediate_size": 2 * size, "patch_size": _PATCH}
    return vision | {"num_heads": 2, "depth": layers, "out_hidden_size": hidden_size}


ConfigAndProcessor = tuple[PretrainedConfig, Any]


def _qwen_vl(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int, *, family: str, videos: str
) -> ConfigAndProcessor:
    """Make Qwen2.5-VL or Qwen3-VL; `family` and `videos` are the first words of the names of its classes."""
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    if family == "Qwen3VL":
        rope |= {"mrope_interleaved": True}
        patch, extra = 16, {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    elif family.startswith("Qwen3_5"):  # a quarter of a head is turned
        rope |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
        text = _DELTA | {"layer_types": _alternating(text, "linear_attention")} | text
        patch, extra = 16, {"num_position_embeddings": 64}
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
    kind = getattr(transformers, f"{'Qwen2_5_VL' if family == 'Qwen2_5_VL' else videos}Processor")
    return config, kind(*parts, chat_template=tokenizer.chat_template)


# vLLM's gated delta rule on CPU knows heads of 128, but not of 32.
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
_DELTA |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}


def _alternating(text: dict[str, Any], kind: str) -> list[str]:
    """Every second of a language model's layers has full attention, the last one among them if they are even."""
    return [kind if n % 2 == 0 else "full_attention" for n in range(text["num_hidden_layers"])]


def _gemma3(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int
) -> ConfigAndProcessor:
    begin, end, image, _ = tokenizer.convert_tokens_to_ids(MARKS)
    # vLLM wants each as a token
    tokenizer.add_tokens([AddedToken(n * "\n", normalized=False) for n in (1, 2, 3, 4)])
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
    return config, transformers.Gemma3Processor(
        images, tokenizer, chat_template=template, image_seq_length=4
    )


def _gemma4(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int, *, family: str = "Gemma4"
) -> ConfigAndProcessor:
    """Make Gemma 4 without audio; `family` is the first word of its classes' names.

    `Gemma4Unified` has no encoder, and image tokens attend to later ones, as in the larger models of Gemma 4.
    """
    marks = [*MARKS[:3], "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"]
    names = ("boi_token", "eoi_token", "image_token", "audio_token", "boa_token", "eoa_token")
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks[3:]])
    tokenizer._set_model_specific_special_tokens(dict(zip(names, marks, strict=True)))
    sound, images, videos = (
        getattr(transformers, family + kind)
        for kind in ("AudioFeatureExtractor", "ImageProcessor", "VideoProcessor")
    )
    parts = sound(), images(patch_size=4, max_soft_tokens=70), tokenizer, videos()
    kind = getattr(transformers, f"{family}Processor")
    processor = kind(*parts, chat_template=tokenizer.chat_template, image_seq_length=70)
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(marks), strict=True))
    layers = {
        "layer_types": _alternating(text, "sliding_attention"),
        "sliding_window": 64,
        "global_head_dim": 64,
    }
    layers |= {"final_logit_softcapping": 30.0}
    if family == "Gemma4":
        layers |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": text["vocab_size"]}
        encoder = {key: vision[key] for key in ("hidden_size", "intermediate_size")} | {"head_dim": 32}
        encoder |= {
            "num_hidden_layers": vision["depth"],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        encoder |= {"position_embedding_size": 256, "default_output_length": 70}
    else:
        layers |= {"use_bidirectional_attention": "vision"}
        encoder = {"mm_embed_dim": text["hidden_size"], "output_proj_dims": text["hidden_size"]}
        encoder |= {"mm_posemb_size": 256, "num_soft_tokens": 70}
    config = getattr(transformers, f"{family}Config")(
        text_config=layers | text,
        vision_config=encoder | {"patch_size": 4},
        boi_token_id=ids["boi_token"],
        eoi_token_id=ids["eoi_token"],
        image_token_id=ids["image_token"],
        audio_token_id=ids["audio_token"],
        boa_token_id=ids["boa_token"],
        eoa_token_index=ids["eoa_token"],
        video_token_id=processor.video_token_id,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    return config, processor


def _mistral3(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int
) -> ConfigAndProcessor:
    """Make Mistral 3 with Ministral 3 as its language model; a line of an image ends with a mark."""
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    rope |= {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    extra = {
        "image_size": largest * 2 * _PATCH,
        "num_attention_heads": 2,
        "num_hidden_layers": vision["depth"],
    }
    kept = {key: vision[key] for key in ("hidden_size", "intermediate_size", "patch_size")}
    config = transformers.Mistral3Config(
        text_config={"model_type": "ministral3", "rope_parameters": rope} | text,
        vision_config={"model_type": "pixtral"} | kept | extra,
        image_token_index=tokenizer.convert_tokens_to_ids(MARKS[2]),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    images = transformers.PixtralImageProcessor(
        size={"longest_edge": largest * 2 * _PATCH}, patch_size=_PATCH
    )
    processor = transformers.PixtralProcessor(
        images,
        tokenizer,
        patch_size=_PATCH,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
        image_token=MARKS[2],
        image_break_token=MARKS[3],
        image_end_token=MARKS[1],
    )
    return config, processor


def _kimi_k25(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int
) -> ConfigAndProcessor:
    """Make Kimi K2.5; its language model is DeepSeek-V3's."""
    tokenizer._set_model_specific_special_tokens({"image_token": MARKS[2], "video_token": MARKS[3]})
    latent = special_settings(
        "deepseek_v2",
        text["num_hidden_layers"],
        text["num_attention_heads"],
        text["head_dim"],
        4,
        text["hidden_size"],
    )
    extra = {
        "num_attention_heads": 2,
        "num_hidden_layers": vision["depth"],
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    kept = {key: vision[key] for key in ("hidden_size", "intermediate_size", "patch_size")}
    config = transformers.Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | text
        | latent,
        vision_config=kept | extra,
        projection_hidden_size=vision["hidden_size"],
        tie_word_embeddings=text["tie_word_embeddings"],
        **dict(zip(_MARK_IDS, tokenizer.convert_tokens_to_ids(MARKS), strict=True)),
    )
    side = 2 * _PATCH * largest
    images = transformers.Kimi_K25ImageProcessor(
        size={"max_height": side, "max_width": side}, patch_size=_PATCH
    )
    parts = images, tokenizer, transformers.Kimi_K25VideoProcessor()
    return config, transformers.Kimi_K25Processor(*parts, chat_template=tokenizer.chat_template)


def _llava(
    tokenizer: PreTrainedTokenizerFast, text: Any, vision: Any, largest: int
) -> ConfigAndProcessor:
    extra = {
        "image_size": 56,
        "num_attention_heads": 2,
        "num_hidden_layers": vision["depth"] + 1,
        "projection_dim": 32,
    }
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
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
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
    "qwen3_5": partial(_qwen_vl, family="Qwen3_5", videos="Qwen3VL"),
    "qwen3_5_moe": partial(_qwen_vl, family="Qwen3_5Moe", videos="Qwen3VL"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": partial(_gemma4, family="Gemma4Unified"),
    "kimi_k25": _kimi_k25,
    "llava": _llava,
    "mistral3": _mistral3,
}
