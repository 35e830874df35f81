"""A tokenizer with one token a byte, made in milliseconds."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% if m.name is defined %}({{ m.name }}){% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{% if thinking is defined %}<think>{% endif %}"
)


def small_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes: ids 0 to 2 are pad, bos and eos, and the 256 bytes follow."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={token: index for index, token in enumerate(special + alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
