#!/usr/bin/env python3
"""Time to bring a mixture's routes to the ranks that train on them, beside the update that uses them.

    python -m trainer.launcher --nproc-per-node 3 scripts/bench/routes.py [--tokens 2048] [--experts 64] [--layers 4]

Each rank has answers that the next rank trains on, so that all of them are sent. In turn and in one run:

    answers   the exchange of ids, log-probabilities and masks, as the learner makes it
    routes    this exchange with the routes of every token, checked, packed and unpacked
    update    forward, backward and optimizer step with these routes

The last column is the share of a step without its rollout, which would make it smaller.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import command_line, in_turns, median, random_policy, save, show, start, this_device
from transformers import Qwen3MoeConfig

from generation.trajectory import Trajectory
from sharding.ranks import is_main, rank, world_size
from trainer.learning.answers import exchange_samples, gather_answers
from trainer.learning.batching import micro_batches
from trainer.learning.groups import to_sample
from trainer.policy.fsdp import FsdpPolicy
from trainer.types import MicroBatch, Outputs, RouteFormat, Sample

ANSWERS = 4  # of each rank
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VOCABULARY = 4096


def make_policy(options: argparse.Namespace, device: torch.device) -> FsdpPolicy:
    """Make a policy of Qwen3-MoE's architecture, with random weights."""
    folder = Path(tempfile.mkdtemp()) / "model"
    experts = {"num_experts": options.experts, "num_experts_per_tok": options.top_k, "head_dim": 64}
    depth = {"num_hidden_layers": options.layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    Qwen3MoeConfig(**SIZES, **depth, **experts, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(
        folder
    )
    return random_policy(folder, options.dtype, device)


def answers(tokens: int, format: RouteFormat) -> list[Trajectory]:
    """Make this rank's answers, as an engine returns them."""
    generator, made = torch.Generator().manual_seed(rank()), []
    for number in range(ANSWERS):
        ids = torch.randint(VOCABULARY, (tokens // ANSWERS,), generator=generator).tolist()
        done = Trajectory(
            rank(), number, ids[:16], ids[16:], [1] * len(ids[16:]), [-8.0] * len(ids[16:])
        )
        scores = torch.rand(len(ids) - 1, len(format.layers), format.experts, generator=generator)
        done.routes = scores.topk(format.top_k).indices.to(format.dtype).numpy()
        made.append(done)
    return made


def exchange(local: list[Trajectory], format: RouteFormat | None) -> list[Sample]:
    """Return the samples for this rank to train on, which are the answers of the rank before it."""
    gathered = gather_answers(local)
    shares = [
        [n for n, a in enumerate(gathered) if a.rank == (r - 1) % world_size()]
        for r in range(world_size())
    ]
    [samples] = exchange_samples([gathered], [shares], partial(to_sample, routes=format), format)
    return samples


def update(policy: FsdpPolicy, samples: list[Sample]) -> None:
    """Run one optimizer step."""
    tokens = sum(len(sample.input_ids) for sample in samples)

    def loss(batch: MicroBatch, outputs: Outputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(outputs.logprobs * batch.loss_mask).sum() / (tokens * world_size()), {}

    policy.update(micro_batches(samples, tokens, 0, policy.device, packing=True), loss, 1.0)


def benchmark(options: argparse.Namespace) -> None:
    """Measure on every rank; rank 0 prints."""
    device = this_device()
    policy = make_policy(options, device)
    assert policy.routing is not None
    format = policy.routing.format
    local = answers(options.tokens, format)
    samples = exchange(local, format)
    actions: dict[str, Callable[[], object]] = {
        "answers": lambda: exchange(local, None),
        "routes": lambda: exchange(local, format),
        "update": lambda: update(policy, samples),
    }
    times = in_turns(actions, options.rounds, device)
    if not is_main():
        return
    middle = {name: median(taken) for name, taken in times.items()}
    step = middle["routes"] + middle["update"]
    title = f"{world_size()} ranks, {options.tokens} tokens of each: {options.experts} experts in {options.layers} layers"
    rows = [[name, f"{value * 1e3:.1f}", f"{value / step:.2%}"] for name, value in middle.items()]
    notes = [
        f"{format.row_bytes} bytes of routes for a token, {format.row_bytes * options.tokens / 2**10:.0f} KiB a rank"
    ]
    show(title, ["", "ms", "of the step"], rows, notes)
    save(
        options.json, {"seconds": times, "row_bytes": format.row_bytes, "share": middle["routes"] / step}
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of each rank's answers together (default: 2048)"
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    start(benchmark, parse(), ranks=True)
