#!/usr/bin/env python3
"""One optimizer step on groups of answers, with their prompts computed once and for each answer, in turn.

    python scripts/bench/prefixes.py [--preset 10M] [--hybrid lfm2] [--shapes 8:1024:128 16:512:128 8:128:512]
                                       [--rounds 3]

A shape is answers of a prompt : tokens of the prompt : tokens of an answer. Both variants take the learner's own loss,
with the same token budget, and their first steps must agree on the norm of its gradient. "Theory" counts operations:
those of `trainer.model_structure`, and the head's logits, which are computed twice. "Of it" is the measured ratio over
theory. Peak memory is beyond that before a variant's first step: gradients and activations. The shape
"nothing in common" has answers to as many prompts, so its ratio is what looking for common beginnings costs. On a CPU
seconds are those that the process computes, so that others disturb less.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
from common import (
    PRESETS,
    PeakMemory,
    add_model,
    command_line,
    median,
    random_policy,
    save,
    show,
    this_device,
    timed,
    write_config,
)

from trainer.config.schema import AlgorithmConfig, BatchConfig
from trainer.distributed import destroy_process_group, init_process_group
from trainer.learning.batching import micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import PolicyLoss
from trainer.policy.fsdp import FsdpPolicy
from trainer.types import Sample

LEAST = BatchConfig().shared_tokens_min
VARIANTS = {"packed": None, "shared": LEAST}
NOTHING = "nothing in common"
SHAPES = [
    "8:128:128",
    "8:512:128",
    "8:1024:128",
    "8:128:512",
    "16:128:128",
    "16:512:128",
    "16:1024:128",
    NOTHING,
]


def samples_of(shape: str, vocabulary: int) -> list[Sample]:
    """Return the answers of one prompt, or of eight prompts that have nothing in common."""
    draw = random.Random(0)
    answers, prompt, answer = map(int, shape.split(":")) if shape != NOTHING else (8, 256, 256)
    prompts = [
        draw.choices(range(vocabulary), k=prompt) for _ in range(answers if shape == NOTHING else 1)
    ]
    return [
        Sample(
            ids + draw.choices(range(vocabulary), k=answer),
            [0] * prompt + [1] * answer,
            [-5.0] * (prompt + answer),
        )
        for ids in (prompts * answers)[:answers]
    ]


def stepper(
    policy: FsdpPolicy, samples: list[Sample], budget: int, least: int | None
) -> Callable[[], float]:
    """Return the learner's step, which returns the norm of its gradient."""
    algorithm = AlgorithmConfig.model_validate({"aggregation": "sequence_mean", "tis_cap": None})
    advantages = torch.tensor(
        [random.Random(n).gauss(0.0, 1.0) for n in range(len(samples))], device=policy.device
    )
    trained = sum(sample.trainable for sample in samples)

    def step() -> float:
        batches = micro_batches(samples, budget, 0, policy.device, packing=True, shared_min=least)
        for batch in batches:
            batch.advantages += advantages[batch.rows, None]
        loss = PolicyLoss(algorithm, MiniBatch([], batches, trained, len(samples)), longest=0)
        return policy.update(batches, loss, 1.0).grad_norm

    return step


def main() -> None:
    """Measure and print."""
    options = parse()
    device = this_device()
    init_process_group(3600, device.type)
    folder = write_config(
        Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype, options.hybrid
    )
    policy = random_policy(folder, options.dtype, device, lr=1e-19)  # every step has the same weights
    rows, figures = [], {}
    for shape in options.shapes:
        samples = samples_of(shape, PRESETS[options.preset][-1])
        logits = policy.work.of.forward(0, sum(sample.trainable for sample in samples), 0)
        steps = {
            name: stepper(policy, samples, options.budget, least) for name, least in VARIANTS.items()
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        norms, peaks, work = {}, {}, {}
        for name, step in steps.items():
            before = policy.work.flops
            with PeakMemory(device) as memory:
                norms[name] = step()
            peaks[name], work[name] = memory.nbytes, policy.work.flops - before + logits
        for turn in range(options.rounds):
            for name in list(steps)[:: 1 if turn % 2 else -1]:
                start = time.process_time()
                wall = timed(steps[name], device)
                times[name].append(wall if device.type == "cuda" else time.process_time() - start)
        if abs(norms["shared"] / norms["packed"] - 1) > (0.05 if options.dtype == "bfloat16" else 1e-4):
            sys.exit(f"{shape}: the variants disagree on the norm of the gradient: {norms}")
        batches = {
            n: micro_batches(samples, options.budget, 0, "cpu", packing=True, shared_min=v)
            for n, v in VARIANTS.items()
        }
        tokens = {
            n: sum(len(b.layout.pack.tokens) for b in some if b.layout.pack)
            for n, some in batches.items()
        }
        ratios = [a / b for a, b in zip(times["packed"], times["shared"], strict=True)]
        theory = work["packed"] / work["shared"]
        rows.append(
            [
                shape,
                f"{tokens['packed']} → {tokens['shared']}",
                f"{median(times['packed']):.2f} → {median(times['shared']):.2f} s",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{theory:.2f}",
                f"{median(ratios) / theory:.0%}",
                f"{peaks['packed'] / 2**20:.0f} → {peaks['shared'] / 2**20:.0f} MiB",
            ]
        )
        figures[shape] = {"tokens": tokens, "seconds": times, "peak_bytes": peaks, "theory": theory}
    destroy_process_group()
    columns = ["answers : prompt : answer", "tokens", "a step", "x", "theory", "of it", "peak"]
    note = f"micro-batches of {options.budget} tokens; medians of {options.rounds} rounds"
    kind = f"{options.preset} {options.hybrid}" if options.hybrid else options.preset
    show(f"Prompts computed once, {kind} {options.dtype}", columns, rows, [note])
    save(options.json, figures)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, rounds=3)
    add_model(parser, "10M")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument(
        "--hybrid",
        choices=["lfm2", "qwen3_5"],
        default="",
        help="mixers in three of four layers: short convolutions, or gated delta rules",
    )
    parser.add_argument("--budget", type=int, default=16384, help="tokens in a micro-batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
