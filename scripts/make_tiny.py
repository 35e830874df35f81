#!/usr/bin/env python3
"""Make a tiny, randomly initialised model with tokenizer and chat template, without a network.

    python scripts/make_tiny.py FOLDER [--architecture qwen2|qwen3|llama|qwen3_moe] [--untied] [--hidden-size N] ...

The result is an ordinary Hugging Face folder with float32 safetensors. The tokenizer has one token a byte (so every
digit is a token), and one for each role name and marker of chats and tool calls.
"""

import argparse
import os
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

PAD, BOS, EOS, START = "<|endoftext|>", "<|bos|>", "<|im_end|>", "<|im_start|>"
TOOL_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
ROLES = ["system", "user", "assistant", "tool"]

ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

# Rendering is plain concatenation, message by message: a longer conversation always begins with the shorter one's text.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'tool' %}
            {{- '<tool_response>' + message.content + '</tool_response>' }}
        {%- else %}
            {{- message.content or '' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '<tool_call>' + {'name': function.name, 'arguments': function.arguments} | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; 270 with special tokens, role names and markers. Any text survives encoding and decoding."""
    special = [PAD, BOS, EOS, START]
    # Byte level, as Qwen's own: Transformers gives a Qwen2 folder that pre-tokenizer, whatever its file says.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + TOOL_MARKS + ROLES + alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    # Ordinary tokens, like those of released models: text shows them even where special tokens are skipped.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_MARKS + ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_tiny_model(
    folder: Path | str,
    *,
    architecture: str = "qwen2",
    tied: bool = True,
    hidden_size: int = 128,
    intermediate_size: int = 512,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 4,
    vocab_size: int = 288,
    seed: int = 0,
) -> Path:
    """Write model, tokenizer and generation config to `folder`, and return it.

    Defaults make 1.02 M parameters. vocab_size may exceed the tokenizer's 270 tokens, as it does in released models; an
    untrained model then samples ids that the tokenizer does not know. Raises ValueError where it is smaller.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens")
    config_type, model_type = ARCHITECTURES[architecture]
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": intermediate_size // 2}
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=2048,
        # The usual 0.02 suits widths of thousands: at this one the layers would start next to nothing and learn late.
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=tied,
        dtype="float32",
        **ids,
        **(moe if architecture == "qwen3_moe" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen2")
    parser.add_argument("--tied", action="store_true", default=True, help="share input and output embeddings (default)")
    parser.add_argument("--untied", dest="tied", action="store_false")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=4, help="of qwen3_moe")
    parser.add_argument("--vocab-size", type=int, default=288)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which gets loaded, would warn of no GPU
    transformers_logging.disable_progress_bar()
    make_tiny_model(options.pop("folder"), **options)


if __name__ == "__main__":
    main()
