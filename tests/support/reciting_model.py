"""A tiny model that recites: its next token depends on the last one alone, so that its answers are known."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from trainer.commands.tiny_model import EOS, PAD, make_tiny_model, make_tokenizer

# Of a prescribed step; its logit is 11 times as large, the length of 128 numbers after the last
# norm
_STRENGTH = 2.0


def base_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tiny tokenizer as base models have it: the end of a turn, <|im_end|>, is not its EOS token."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = PAD
    assert tokenizer.convert_tokens_to_ids(EOS) != tokenizer.eos_token_id
    return tokenizer


def make_reciting_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, following: Mapping[str, str]
) -> Path:
    """Write a model in which one of the tokens in the text `following[token]` comes after `token`, each as likely."""
    make_tiny_model(folder, tokenizer=tokenizer, tied=False, layers=1, intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:  # without these, a position's state is its token's embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for token, choices in following.items():
            [before] = tokenizer(token, add_special_tokens=False)["input_ids"]
            state = model.model.embed_tokens.weight[before]
            for after in tokenizer(choices, add_special_tokens=False)["input_ids"]:
                model.lm_head.weight[after] += _STRENGTH * state / state.norm()
    model.save_pretrained(folder)
    return folder
