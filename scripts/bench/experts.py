#!/usr/bin/env python3
"""A mixture's experts, forward and backward: grouped products against a loop over experts, in turn and in one run.

    python scripts/bench/experts.py [--tokens 2048] [--hidden 256] [--width 128] [--experts 32] [--top-k 4]

    grouped   Transformers' grouped_mm, its default where torch has it: a token's experts sorted, one product for all
    batched   its batched_mm: a copy of the weights for each token and expert
    loop      its eager experts: a product for each expert that any token goes to

Routes are even, or all tokens go to experts drawn with weights 1, 1/2, 1/3 …, as an unbalanced router's do. The last
column relates the arithmetic (6 operations for each weight and token) to what the machine does in a plain product.

    python -m trainer.launcher --nproc-per-node 2 scripts/bench/experts.py --split [--layers 4] [--length 256]

With --split, updates of a policy with such layers, whose experts each rank gathers, or has a part of
(policy.expert_parallel): the largest memory of all tensors that a rank holds, which torch's tracker follows, beside the
plan's, and tokens a second of all ranks. Two micro-batches have `--tokens` tokens each, and layers are recomputed.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
from common import command_line, in_turns, median, random_policy, save, show, start, this_device
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from sharding.ranks import exchange, is_main, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import GIB, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.learning.batching import micro_batches
from trainer.policy.fsdp import FsdpPolicy
from trainer.types import MicroBatch, Outputs, Sample

WAYS = {"grouped": "grouped_mm", "batched": "batched_mm", "loop": "eager"}
COPIES_GIB = 1.0  # of weights that batched_mm may make; it is left out beyond


def make(options: argparse.Namespace, device: torch.device) -> dict[str, Qwen3MoeExperts]:
    """Make equal experts for each way to compute them."""
    layers = {}
    for name, way in WAYS.items():
        config = Qwen3MoeConfig(
            hidden_size=options.hidden, moe_intermediate_size=options.width, num_experts=options.experts
        )
        config._experts_implementation = way
        layers[name] = experts = Qwen3MoeExperts(config).to(device, getattr(torch, options.dtype))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * options.hidden**-0.5)
    copied = (
        options.tokens
        * options.top_k
        * 3
        * options.hidden
        * options.width
        * layers["loop"].down_proj.itemsize
    )
    if copied > COPIES_GIB * 2**30:
        del layers["batched"]
    return layers


def routes(options: argparse.Namespace, even: bool) -> Tensor:
    """Draw the experts [tokens, top_k] of each token."""
    weights = torch.ones(options.experts) if even else 1 / torch.arange(1, options.experts + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(weights.expand(options.tokens, -1), options.top_k, generator=generator)


def pass_of(
    experts: Qwen3MoeExperts, hidden: Tensor, chosen: Tensor, scores: Tensor
) -> Callable[[], None]:
    """Return an action that runs forward and backward once."""

    def run() -> None:
        hidden.grad = None
        experts.zero_grad()
        experts(hidden, chosen, scores).sum().backward()

    return run


class FirstCalls(list[MicroBatch]):
    """Micro-batches of an update that a tracker follows, which would take the second for a repeated call."""

    def __init__(self, batches: list[MicroBatch], tracker: FSDPMemTracker) -> None:
        super().__init__(batches)
        self.tracker = tracker

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in super().__iter__():
            self.tracker.reset_mod_stats()
            yield batch


def recipe(options: argparse.Namespace, folder: Path, size: int) -> TrainConfig:
    """Return the recipe of the updates that are measured, for the plan."""
    half = options.length // 2
    answers = 2 * world_size() * (options.tokens // options.length)
    sections: dict[str, dict[str, Any]] = {
        "run": {"device": this_device().type},
        "model": {"path": str(folder)},
        "data": {"path": "d", "max_prompt_tokens": half},
        "sampling": {"max_tokens": options.length - half},
        "batch": {"prompts_per_step": answers, "tokens_per_micro_batch": options.tokens},
        "algorithm": {"group_size": 1},
        "policy": {
            "dtype": options.dtype,
            "activation_checkpointing": "full",
            "expert_parallel": size,
            "lr": 1e-9,
        },
    }
    return TrainConfig.model_validate(sections)


def update(policy: FsdpPolicy, batches: list[MicroBatch], tokens: int) -> None:
    """Run one optimizer step."""

    def loss(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -(outputs.logprobs * batch.loss_mask).sum() / tokens, {}

    policy.update(batches, loss, 1.0)


def peak(policy: FsdpPolicy, batches: list[MicroBatch], tokens: int) -> int:
    """Return bytes of all tensors of the policy in an update, when they are most."""
    with FSDPMemTracker(policy.module, policy.optimizer) as tracker:
        update(policy, FirstCalls(batches, tracker), tokens)
    devices = tracker.get_tracker_snapshot("peak")
    return max(int(devices[device]["Total"]) for device in devices if device.type == policy.device.type)


def split(options: argparse.Namespace) -> None:
    """Measure updates with gathered and with split experts on every rank; rank 0 prints."""
    device, folder = this_device(), Path(tempfile.mkdtemp()) / "model"
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=options.hidden,
        moe_intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.hidden // 8,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        vocab_size=8192,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    generator, half = torch.Generator().manual_seed(rank()), options.length // 2
    ids = torch.randint(
        8192, (2 * (options.tokens // options.length), options.length), generator=generator
    )
    samples = [
        Sample(row, [0] * half + [1] * (options.length - half), [0.0] * options.length)
        for row in ids.tolist()
    ]
    figures, rows = {}, []
    for size in (1, world_size()):
        config = recipe(options, folder, size)
        policy = random_policy(folder, device=device, **config.policy.model_dump(exclude_unset=True))
        batches = micro_batches(samples, options.tokens, 0, device, packing=True)
        seconds = in_turns({"": partial(update, policy, batches, ids.numel())}, options.rounds, device)[
            ""
        ]
        tracked = max(exchange(peak(policy, batches, ids.numel())))
        parts = trainer_parts(config, model_sizes(config, str(folder)), world_size(), 80.0)
        planned = sum(part.training for part in parts if part.name != "CUDA and NCCL")
        rate = world_size() * ids.numel() / median(seconds)
        figures[size] = {"seconds": seconds, "peak_bytes": tracked, "planned_bytes": planned}
        rows.append(
            [
                f"expert_parallel: {size}",
                f"{tracked / GIB:.3f} GiB",
                f"{planned / GIB:.3f} GiB",
                f"{planned / tracked - 1:+.1%}",
                f"{rate:,.0f}",
            ]
        )
        del policy
    if is_main():
        sizes = (
            f"{options.experts} experts of {options.hidden} x {options.width} in {options.layers} layers"
        )
        title = (
            f"{sizes}, {options.dtype}, {world_size()} ranks; micro-batches of {options.tokens} tokens"
        )
        show(title, ["policy", "peak", "planned", "difference", "tokens/s"], rows, [])
        save(options.json, {"options": vars(options) | {"json": None}, "figures": figures})


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=128, help="width of an expert's hidden layer")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--split", action="store_true", help="updates on several ranks; see above")
    parser.add_argument("--layers", type=int, default=4, help="with --split: layers of the policy")
    parser.add_argument("--length", type=int, default=256, help="with --split: tokens of a sequence")
    options = parser.parse_args()
    if options.split:
        start(split, options, ranks=True)
    device = this_device()
    dtype, ways = getattr(torch, options.dtype), make(options, device)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    scores = torch.full((options.tokens, options.top_k), 1 / options.top_k, device=device, dtype=dtype)
    side = torch.randn(1024, 1024, device=device, dtype=dtype)
    rate = (
        2
        * 1024**3
        / median(in_turns({"product": lambda: side @ side}, options.rounds, device)["product"])
    )
    operations = 6 * 3 * options.hidden * options.width * options.tokens * options.top_k
    rows, figures = [], {}
    for spread, even in (("even", True), ("uneven", False)):
        chosen = routes(options, even).to(device)
        results = {name: experts(hidden, chosen, scores) for name, experts in ways.items()}
        for name, result in results.items():
            assert torch.allclose(result, results["loop"], atol=0.05, rtol=0.05), name
        times = in_turns(
            {n: pass_of(e, hidden, chosen, scores) for n, e in ways.items()}, options.rounds, device
        )
        figures[spread] = times
        for name, taken in times.items():
            seconds = median(taken)
            ratio = median(times["loop"]) / seconds
            share = operations / seconds / rate
            rows.append(
                [spread, name, f"{options.tokens / seconds:,.0f}", f"{ratio:.2f} x", f"{share:.0%}"]
            )
    sizes = f"{options.experts} experts of {options.hidden} x {options.width}, {options.dtype}"
    title = f"{sizes}; {options.tokens} tokens, {options.top_k} experts for each"
    show(title, ["routes", "experts", "tokens/s", "against the loop", "of a plain product"], rows, [])
    save(options.json, {"options": vars(options) | {"json": None}, "seconds": figures})


if __name__ == "__main__":
    main()
