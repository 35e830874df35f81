#!/usr/bin/env python3
"""Cost of looking into rows: cleaning and checking their messages, against rendering and tokenising them.

    python scripts/bench/rows.py [--rows 4000] [--rounds 3]

Rows are conversations whose texts are paragraphs of the documentation, some in parts, some with a call whose arguments
are JSON text; the tokenizer is trained on the same paragraphs. Seconds are those that the process computes. Memory is
what Python has allocated: "held" compares loaded prompts with their bare rows and ids, "passing" is the peak while rows
go by and none is kept, as a share of the file.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from trainer.config.schema import DataConfig
from trainer.data import load_prompts, prompt_rows, row_reader

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string else '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def paragraphs() -> list[str]:
    """Return the paragraphs of the documentation that are longer than a line."""
    pages = (Path(__file__).resolve().parents[2] / "docs").glob("*.md")
    texts = [paragraph for page in sorted(pages) for paragraph in page.read_text("utf-8").split("\n\n")]
    return [text for text in texts if 200 < len(text) < 2000]


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte pairs, trained on texts."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token=SPECIAL[0]
    )


def make_row(texts: list[str], draw: random.Random) -> dict[str, Any]:
    """Return a conversation of four messages, in one of three forms."""
    call = {
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps({"page": draw.random()})},
    }
    question = draw.choice(texts)
    content: Any = [{"type": "text", "text": question}] if draw.random() < 0.3 else question
    middle = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": draw.choice(texts)},
    ]
    if draw.random() < 0.7:
        middle = [
            {"role": "assistant", "content": draw.choice(texts)},
            {"role": "user", "content": draw.choice(texts)},
        ]
    return {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": content},
            *middle,
        ]
    }


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that the process computes for `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


def held_bytes(make: Callable[[], Any]) -> tuple[int, int]:
    """Return the bytes that Python holds for what `make` returns, and the most that it held meanwhile."""
    tracemalloc.start()
    kept = make()
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return current, peak


def main() -> None:
    """Print two tables of one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = paragraphs()
    tokenizer = trained_tokenizer(texts)
    draw = random.Random(0)
    rows = [make_row(texts, draw) for _ in range(options.rows)]
    reader = row_reader(DataConfig(path="memory"), tokenizer)
    form = reader.form
    assert form is not None
    fitted = [[form.fitted(message) for message in reader.messages(row)] for row in rows]

    def check() -> None:
        for row in rows:
            messages = reader.messages(row)
            reader.tools(row)
            reader.remarks(row, messages)
            for message in messages:
                form.fitted(message)

    def tokenise() -> None:
        rendered = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in fitted
        ]
        tokenizer(rendered, add_special_tokens=False)

    ratios = []
    for _ in range(options.rounds):
        checking, tokenising = seconds(check), seconds(tokenise)
        ratios.append(checking / tokenising)
        each = f"{checking / len(rows) * 1e6:.1f} µs a row, tokenising {tokenising / len(rows) * 1e6:.1f} µs"
        print(f"checking {each}: {ratios[-1]:.3f}")
    print(
        f"checking / tokenising, median of {options.rounds}: {statistics.median(ratios):.3f} (at most 0.1 is asked for)"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        config = DataConfig(path=str(file), answer_key=None, max_prompt_tokens=10**6)
        load_prompts(config, tokenizer)  # prepares the rows, and imports what it needs
        bare, _ = held_bytes(
            lambda: [(row.row, row.token_ids) for row in prompt_rows(config, tokenizer)]
        )
        prompts, _ = held_bytes(lambda: load_prompts(config, tokenizer))
        _, passing = held_bytes(
            lambda: sum(len(row.token_ids) for row in prompt_rows(config, tokenizer))
        )
        print(f"held: prompts / their bare rows and ids: {prompts / bare:.3f}")
        print(
            f"passing: peak / file of {file.stat().st_size >> 10} KiB: {passing / file.stat().st_size:.3f}"
        )


if __name__ == "__main__":
    main()
