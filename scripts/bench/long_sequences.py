#!/usr/bin/env python3
"""One update on one long sequence: by one of two ranks, while the other waits, and shared by both.

    python -m trainer.launcher --nproc-per-node 2 scripts/bench/long_sequences.py [--tokens 32768] [--json FILE]

Both have the same packs, weights and loss, and their gradients must agree: the distance of all gradients together is
relative to their norm. Memory is the peak of one rank, beyond its memory before the update: activations, gradients and
buffers of collectives; on a CPU it is resident memory. The second column of memory has only what autograd keeps for
backward, counted tensor by tensor. With more ranks, all of them share the sequence.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import command_line, random_policy, save, show, start, this_device, timed
from torch import Tensor
from train_step import GIB, PeakMemory
from transformers import Qwen2Config

from sharding.ranks import exchange, is_main, rank, world_size
from trainer.learning.batching import micro_batches
from trainer.policy.fsdp import FsdpPolicy
from trainer.types import MicroBatch, Outputs, Sample

MODEL = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 14336,
    "tie_word_embeddings": True,
}
"""10M parameters, with little attention: at 32k tokens it is most of the work all the same."""

LIMITS = {"memory": 0.6, "gradients": 1e-6}
"""Goals: the share of one rank's peak memory that two need, and the relative distance of float32 gradients."""


class Kept:
    """A context that counts the bytes that autograd keeps for backward: each storage once, parameters left out."""

    def __init__(self) -> None:
        self.nbytes, self._seen = 0, set[int]()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor

    def __enter__(self) -> "Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(*_)


def update(policy: FsdpPolicy, sample: Sample, ways: int) -> dict[str, Any]:
    """Run one optimizer step on one sequence, shared by `ways` ranks; return its gradients, seconds and bytes."""
    gradients: dict[str, Tensor] = {}

    def capture(*_: Any) -> None:
        sharded: dict[str, Any] = {name: parameter.grad for name, parameter in policy.trained().items()}
        gradients.update({name: gradient.full_tensor() for name, gradient in sharded.items()})

    samples = [sample] if rank() < ways else []
    tokens = len(sample.input_ids)
    batches = micro_batches(samples, tokens, 0, policy.device, packing=True, ways=ways)

    def loss(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -(outputs.logprobs * batch.loss_mask).sum() / tokens, {}

    handle = policy.optimizer.register_step_pre_hook(capture)
    with PeakMemory(policy.device) as memory, Kept() as kept:
        seconds = timed(lambda: policy.update(batches, loss, 1.0), policy.device)
    handle.remove()
    return {
        "gradients": gradients,
        "seconds": seconds,
        "peak_bytes": memory.nbytes,
        "kept_bytes": kept.nbytes,
    }


def benchmark(options: argparse.Namespace) -> None:
    """Measure on every rank; rank 0 prints."""
    device = this_device()
    folder = Path(tempfile.mkdtemp()) / "model"
    Qwen2Config(**MODEL, dtype=options.dtype, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    policy = random_policy(folder, options.dtype, device, lr=1e-19)  # both begin with the same weights
    generator = torch.Generator().manual_seed(0)

    def sample(tokens: int) -> Sample:
        ids = torch.randint(MODEL["vocab_size"], (tokens,), generator=generator).tolist()
        return Sample(ids, [1] * tokens, [0.0] * tokens)

    short, long = sample(64), sample(options.tokens)
    variants: dict[str, Callable[[Sample], dict[str, Any]]] = {
        "one rank": lambda sample: update(policy, sample, 1),
        f"{world_size()} ranks": lambda sample: update(policy, sample, world_size()),
    }
    for variant in variants.values():
        variant(short)  # groups and buffers are made at first use
    figures = {name: variant(long) for name, variant in variants.items()}
    alone, shared = (result.pop("gradients") for result in figures.values())
    norm = torch.stack([g.double().norm() for g in alone.values()]).norm()
    distance = torch.stack([(shared[name] - g).double().norm() for name, g in alone.items()]).norm()
    off = float(distance / norm)
    of_ranks = exchange(figures)
    if is_main():
        report(options, {name: [result[name] for result in of_ranks] for name in figures}, off)


def report(options: argparse.Namespace, figures: dict[str, list[dict[str, Any]]], off: float) -> None:
    """Print the table; memory is that of the rank that uses the most."""
    rows, peaks = [], {}
    for name, ranks in figures.items():
        peak, kept = (max(result[key] for result in ranks) for key in ("peak_bytes", "kept_bytes"))
        peaks[name] = peak, kept
        alone = peaks["one rank"]
        rows.append(
            [
                name,
                f"{ranks[0]['seconds']:.1f} s",
                f"{peak / GIB:.2f} GiB",
                f"{peak / alone[0]:.2f}",
                f"{kept / GIB:.2f} GiB",
                f"{kept / alone[1]:.2f}",
            ]
        )
    show(
        f"One sequence of {options.tokens} tokens, 10M parameters, {options.dtype}",
        ["", "an update", "peak", "of one rank's", "kept for backward", "of one rank's"],
        rows,
        [
            f"gradients are {off:.1e} of their norm apart (reach: {LIMITS['gradients']:g} in float32); peak of two ranks: "
            f"at most {LIMITS['memory']} of one's"
        ],
    )
    save(options.json, {"ranks": figures, "gradients_apart": off, "tokens": options.tokens})


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of forward and backward"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="of the sequence (default: 32768)")
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse(), ranks=True)
