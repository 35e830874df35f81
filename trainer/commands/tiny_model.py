"""Maker of a tiny, randomly initialised model with tokenizer and chat template, which needs no
network.

The result is an ordinary Hugging Face folder with float32 safetensors. The tokenizer has one token
per byte (so every digit is a token), and one for each role name and marker of chats and tool calls.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from trainer.surroundings import follow_umask

PAD = "<|endoftext|>"
BOS = "<|bos|>"
EOS = "<|im_end|>"
START = "<|im_start|>"
TOOL_MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
ROLES = ["system", "user", "assistant", "tool"]

ARCHITECTURES = ("qwen2", "qwen3", "llama", "gemma3", "qwen3_moe", "deepseek_v2", "lfm2")

# Rendering is plain concatenation, message by message: a longer conversation always begins with the
# shorter one's text.
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
            {{- '<tool_call>' + {'name': function.name, 'arguments': function.arguments} | tojson
                + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte; with special tokens, role names and markers it has
    270 tokens.

    Any text survives encoding and decoding.
    """
    special = [PAD, BOS, EOS, START]
    # Byte level like Qwen's, since Transformers gives a Qwen2 folder that pre-tokenizer, whatever
    # its file says.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + TOOL_MARKS + ROLES + alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    # These are ordinary tokens, as in released models: decoded text has them even if special tokens
    # are skipped.
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


def text_settings(
    tokenizer: PreTrainedTokenizerBase,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
) -> dict[str, Any]:
    """Return the settings that the language models of all architectures have."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": 2048,
        # The usual 0.02 suits widths of thousands: at this width the layers would start near zero
        # and learn late.
        "initializer_range": hidden_size**-0.5,
        "tie_word_embeddings": tied,
        **token_ids(tokenizer),
    }


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of special tokens, under the names that a model's configurations give them."""
    return {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def special_settings(
    architecture: str, layers: int, heads: int, head_dim: int, experts: int, width: int
) -> dict[str, Any]:
    """Return the settings that only one architecture has, or that it fixes."""
    moe = {"num_experts_per_tok": 2, "moe_intermediate_size": width}
    if architecture == "gemma3":
        return {"query_pre_attn_scalar": head_dim, "sliding_window": 64}
    if architecture == "qwen3_moe":
        return moe | {"num_experts": experts}
    if architecture == "lfm2":  # a hybrid; vLLM reads the last two keys
        types = ["full_attention" if number % 2 else "conv" for number in range(layers)]
        return {"layer_types": types, "conv_dim": heads * head_dim, "block_dim": heads * head_dim}
    if architecture != "deepseek_v2":
        return {}
    # vLLM's attention on CPU supports one size of latent vectors, 512 and 64; and its plain rotary
    # embedding on CPU (0.32) is wrong for queries that are part of a larger tensor, as MLA's are;
    # the scaled kind of released models is right.
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = yarn | {
        "rope_theta": 10000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    sizes = {
        "q_lora_rank": 3 * head_dim // 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
    }
    sizes |= {"qk_nope_head_dim": head_dim, "v_head_dim": head_dim, "num_key_value_heads": heads}
    mixture = {"first_k_dense_replace": 1, "n_routed_experts": experts, "n_shared_experts": 1}
    return moe | sizes | mixture | {"n_group": 1, "topk_group": 1, "rope_parameters": rope}


def make_tiny_model(
    folder: Path | str,
    *,
    architecture: str = "qwen2",
    tokenizer: PreTrainedTokenizerBase | None = None,
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
    """Write model, tokenizer and generation config to `folder`, and return the folder.

    The defaults make 1.02 M parameters. `tokenizer` stands for the one with a token per byte.
    vocab_size may exceed the tokenizer's tokens, as in released models; an untrained model then
    samples ids that the tokenizer does not have.

    Raises: ValueError: vocab_size is smaller than the tokenizer; or `tied` for an architecture that
        vLLM never ties.
    """
    folder = Path(folder)
    tokenizer = tokenizer or make_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens")
    if tied and architecture == "deepseek_v2":
        raise ValueError("vLLM does not support deepseek_v2 with a tied head: make it untied")
    shape = text_settings(tokenizer, hidden_size, layers, heads, kv_heads, tied)
    shape |= {"vocab_size": vocab_size, "intermediate_size": intermediate_size, "dtype": "float32"}
    shape |= special_settings(
        architecture, layers, heads, hidden_size // heads, experts, intermediate_size // 2
    )
    config = AutoConfig.for_model("gemma3_text" if architecture == "gemma3" else architecture, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**token_ids(tokenizer))
    model.save_pretrained(folder)
    follow_umask(Path(folder))
    tokenizer.save_pretrained(folder)
    return folder
