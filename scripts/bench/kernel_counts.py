#!/usr/bin/env python3
"""Kernels, bytes and operations of one layer and of the output head, counted without a GPU.

    python scripts/bench/kernel_counts.py FOLDER [--tokens 16384] [--tflops 700] [--tb 2.8] [--json FILE]

FOLDER has a model's config.json; no weights are read. A layer's passes are forward, forward
again in backward, and backward, in bfloat16, as the mean over all layers. `eager` is `policy.compile: false`. In `fused`,
norms, rotary embeddings, gates, and what the head makes of a block of logits, are counted by their inputs and outputs
(`trainer.estimates.kernels`). The head is `target_logprobs`, for as many targets as there are tokens.

Gigabytes are those of all kernels but products that are bound by their operations. Milliseconds follow from the rates
given, by default an H100's sustained ones, and from 10 us for each launch, which the host makes at the same time.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import save, show

from trainer.config.model_file import model_config
from trainer.config.schema import TrainConfig
from trainer.estimates.kernels import KernelCounter, PassCount, as_one_kernel, count_kernels
from trainer.estimates.time import LAUNCH
from trainer.policy.logprobs import block_shape, cuda_block_elements, target_logprobs

LENGTH = 1024  # tokens of a sequence


def layer_counts(folder: str, tokens: int, compile: bool | None) -> PassCount:
    """Return the mean over layers of all passes of a layer that is recomputed."""
    sections = {
        "model": {"path": folder},
        "policy": {"dtype": "bfloat16", "compile": compile},
        "data": {"path": folder},  # not read
    }
    config = TrainConfig.model_validate(sections)
    counts = count_kernels(config, folder, max(1, tokens // LENGTH), LENGTH)
    return (counts.forward.times(2) + counts.backward).times(1 / sizes(folder)["num_hidden_layers"])


def sizes(folder: str) -> dict[str, int]:
    """Return the keys of the language model's configuration."""
    config = model_config(folder)
    return config.get("text_config") or config


def head_counts(folder: str, tokens: int, **make: Any) -> PassCount:
    """Return the count of a forward and backward pass of the output head on an 80 GiB device."""
    width, vocabulary = (sizes(folder)[key] for key in ("hidden_size", "vocab_size"))
    hidden, weight = (
        torch.empty(rows, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for rows in (tokens, vocabulary)
    )
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    block = block_shape(cuda_block_elements(80 << 30), vocabulary)
    with KernelCounter() as counter:
        logprobs, _ = target_logprobs(hidden, weight, None, targets, block=block, **make)
        torch.autograd.grad([logprobs], [hidden, weight], [torch.empty_like(logprobs)])
    return counter.per_token(tokens)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--tflops", type=float, default=700.0, help="sustained rate of products")
    parser.add_argument("--tb", type=float, default=2.8, help="sustained terabytes a second of memory")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    folder = options.folder
    counts = {
        "layer, eager": layer_counts(folder, options.tokens, False),
        "layer, fused": layer_counts(folder, options.tokens, None),
        "head, eager": head_counts(folder, options.tokens),
        "head, fused": head_counts(folder, options.tokens, make=as_one_kernel),
    }
    rows = [row(name, count, options) for name, count in counts.items()]
    columns = ["part", "kernels", "products", "GB", "products, ms", "memory, ms", "launches, ms"]
    show(f"{folder}, {options.tokens} tokens", columns, rows, [])
    save(options.json, {name: vars(count) for name, count in counts.items()})


def row(name: str, count: PassCount, options: argparse.Namespace) -> list[str]:
    """Return a row of the table."""
    gigabytes = count.token_bytes * options.tokens / 1e9
    operations = count.token_operations * options.tokens
    return [
        name,
        f"{count.kernels:.0f}",
        f"{count.products:.0f}",
        f"{gigabytes:.1f}",
        f"{operations / options.tflops / 1e9:.1f}",
        f"{gigabytes / options.tb:.1f}",
        f"{count.kernels * LAUNCH * 1e3:.1f}",
    ]


if __name__ == "__main__":
    main()
