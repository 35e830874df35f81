#!/usr/bin/env python3
"""One optimizer step on the same batch and weights: ours, padded and packed, against TRL's GRPO step, in turn.

    python scripts/bench/train_step.py [--preset 0.1B] [--sequences 16] [--longest 1024] [--rounds 3] [--json FILE]
    python scripts/bench/train_step.py --preset 7B --dtype bfloat16 --sequences 64 --variants packed      (one GPU)

    TRL     GRPOTrainer._compute_loss for each micro-batch of --rows answers, on a model that TRL's constructor would
            give its chunked head (add_fused_lm_head); backward; clip_grad_norm_ and a fused AdamW. Its tensors are as
            its generation leaves them: prompts padded on the left and answers on the right, to the longest of all.
            Gradient checkpointing is off on both sides.
    padded  FsdpPolicy.update with the learner's own loss, sequences sorted by length and padded within micro-batches
    packed  the same without padding
    shared  packed, with each prompt computed once for its --group of answers

Lengths are log-normal; with --group, prompts have --prompt tokens, and answers 64 to 128; with --exactly N, each prompt
and its answer have N tokens together. --recompute checkpoints the activations of all layers, in our variants alone.

All take the same loss (GRPO, mean over answers of means over tokens), and their first
steps must agree on the norm of its gradient. Tokens are real ones, prompts included. The last column relates the
arithmetic that the real tokens need (6 operations for each weight and token, the output head's for answers only;
attention, which is little at these lengths, left out) to what the machine does in a plain matrix product. Peak memory
is beyond that before the first step of a variant: gradients and activations, without weights and optimizer state.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import torch
from common import (
    PRESETS,
    PeakMemory,
    add_model,
    command_line,
    matmul_rate,
    median,
    random_policy,
    save,
    show,
    this_device,
    timed,
    write_config,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.config.schema import AlgorithmConfig
from trainer.distributed import destroy_process_group, init_process_group
from trainer.learning.batching import micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import PolicyLoss
from trainer.policy.fsdp import FsdpPolicy
from trainer.types import Sample

GIB = 2**30
VARIANTS = ("TRL", "padded", "packed", "shared")
Step = Callable[[], float]
"""An optimizer step; returns the norm of its gradient."""


@dataclass
class Answers:
    """Prompts and answers with their advantages."""

    prompts: list[list[int]]
    answers: list[list[int]]
    advantages: list[float]

    @classmethod
    def random(cls, count: int, longest: int, vocabulary: int) -> "Answers":
        """Draw log-normal lengths: prompts around a sixteenth of `longest`, answer around a fifth and at least 64."""
        draw = random.Random(0)

        def lengths(typical: int, most: int) -> list[int]:
            return [
                min(most, max(16, int(typical * draw.lognormvariate(0.0, 0.7)))) for _ in range(count)
            ]

        def tokens(length: int) -> list[int]:
            return [draw.randrange(vocabulary) for _ in range(length)]

        return cls(
            [tokens(length) for length in lengths(longest // 16, longest // 4)],
            [tokens(max(64, length)) for length in lengths(longest // 5, longest)],
            [draw.gauss(0.0, 1.0) for _ in range(count)],
        )

    @classmethod
    def groups(cls, count: int, group: int, prompt: int, vocabulary: int) -> "Answers":
        """Draw groups of answers of 64 to 128 tokens to prompts of `prompt` tokens."""
        draw = random.Random(0)
        prompts = [draw.choices(range(vocabulary), k=prompt) for _ in range(count // group)]
        answers = [draw.choices(range(vocabulary), k=draw.randint(64, 128)) for _ in range(count)]
        return cls(
            [ids for ids in prompts for _ in range(group)],
            answers,
            [draw.gauss(0.0, 1.0) for _ in range(count)],
        )

    @classmethod
    def equal(cls, count: int, length: int, vocabulary: int) -> "Answers":
        """Draw sequences of `length` tokens each, a sixteenth of them prompts."""
        draw = random.Random(0)
        prompt = length // 16
        return cls(
            [draw.choices(range(vocabulary), k=prompt) for _ in range(count)],
            [draw.choices(range(vocabulary), k=length - prompt) for _ in range(count)],
            [draw.gauss(0.0, 1.0) for _ in range(count)],
        )

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(map(len, self.prompts)) + self.scored

    @property
    def scored(self) -> int:
        """The number of tokens in answers."""
        return sum(map(len, self.answers))


def ours(
    policy: FsdpPolicy, batch: Answers, budget: int, packing: bool, shared_min: int | None = None
) -> Step:
    """Return the step as the learner makes it."""
    samples = [
        Sample(p + a, [0] * len(p) + [1] * len(a), [0.0] * len(p + a))
        for p, a in zip(batch.prompts, batch.answers, strict=True)
    ]
    algorithm = AlgorithmConfig.model_validate({"aggregation": "sequence_mean", "tis_cap": None})

    def step() -> float:
        batches = micro_batches(
            samples, budget, 0, policy.device, packing=packing, shared_min=shared_min
        )
        for micro in batches:
            micro.advantages += torch.tensor(batch.advantages, device=policy.device)[micro.rows, None]
        loss = PolicyLoss(algorithm, MiniBatch([], batches, batch.scored, len(samples)), longest=0)
        return policy.update(batches, loss, 1.0).grad_norm

    return step


def trl(model: PreTrainedModel, batch: Answers, rows: int) -> Step:
    """Return the step as GRPOTrainer makes it; its constructor, which needs a dataset and rewards, is not called."""
    # TRL would import vLLM for parts that are not used here.
    with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
        from trl.trainer import grpo_trainer
        from trl.trainer.utils import add_fused_lm_head, pad
    device = model.device
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    trainer = grpo_trainer.GRPOTrainer.__new__(grpo_trainer.GRPOTrainer)
    algorithm = AlgorithmConfig.model_validate({})
    trainer.__dict__.update(
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=algorithm.clip_low,
        beta=0.0,
        epsilon_high=algorithm.clip_high,
        top_entropy_quantile=1.0,
        entropy_coef=0.0,
        _entropy_bonus_enabled=False,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        model=model.train(),
        current_gradient_accumulation_steps=-(-len(batch.answers) // rows),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(delta=None, report_to=[]),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            autocast=nullcontext,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            num_processes=1,
            is_main_process=True,
            device=device,
        ),
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )

    def padded(sequences: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ids = pad([torch.tensor(s) for s in sequences], padding_value=0, padding_side=side)
        mask = pad(
            [torch.ones(len(s), dtype=torch.long) for s in sequences], padding_value=0, padding_side=side
        )
        return ids.to(device), mask.to(device)

    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    prompts, answers = padded(batch.prompts, "left"), padded(batch.answers, "right")
    tensors = (*prompts, *answers, torch.tensor(batch.advantages, device=device))

    def step() -> float:
        for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            trainer._compute_loss(model, dict(zip(names, parts, strict=True))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm.item()

    return step


def twin(policy: FsdpPolicy, folder: Path) -> PreTrainedModel:
    """Make a plain Transformers model with the policy's weights."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            model.get_parameter(name).copy_(parameter.full_tensor())
    model.tie_weights()
    return model.to(policy.device)


def needed_operations(policy: FsdpPolicy, batch: Answers) -> float:
    """Return the operations that forward and backward of the tokens without padding need."""
    head = policy.model.get_output_embeddings().weight.numel()
    embeddings = policy.model.get_input_embeddings().weight.numel()
    tied = policy.model.config.tie_word_embeddings
    trunk = sum(p.numel() for _, p in policy.named_parameters()) - embeddings - (0 if tied else head)
    return 6.0 * (trunk * batch.tokens + head * batch.scored)


def main() -> None:
    """Measure and print."""
    options = parse()
    device = this_device()
    init_process_group(3600, device.type)
    folder = write_config(Path(tempfile.mkdtemp()) / "model", options.preset, options.dtype)
    # With this rate, every variant's first step has the same weights.
    policy = random_policy(
        folder, options.dtype, device, lr=1e-19, activation_checkpointing=options.recompute
    )
    vocabulary = PRESETS[options.preset][-1]
    batch = Answers.random(options.sequences, options.longest, vocabulary)
    if options.group > 1:
        batch = Answers.groups(options.sequences, options.group, options.prompt, vocabulary)
    if options.exactly:
        batch = Answers.equal(options.sequences, options.exactly, vocabulary)
    makers: dict[str, Callable[[], Step]] = {
        "TRL": lambda: trl(twin(policy, folder), batch, options.rows),
        "padded": lambda: ours(policy, batch, options.budget, packing=False),
        "packed": lambda: ours(policy, batch, options.budget, packing=True),
        "shared": lambda: ours(policy, batch, options.budget, packing=True, shared_min=64),
    }
    steps = {name: makers[name]() for name in options.variants}
    norms, times, peaks = {}, defaultdict(list), {}
    rates = [matmul_rate(device, getattr(torch, options.dtype))]
    for name, step in steps.items():
        with PeakMemory(device) as memory:
            norms[name] = step()
        peaks[name] = memory.nbytes
    for turn in range(options.rounds):
        order = options.variants if turn % 2 else options.variants[::-1]
        for name in order:
            times[name].append(timed(steps[name], device))
        rates.append(matmul_rate(device, getattr(torch, options.dtype)))
    destroy_process_group()
    report(options, batch, norms, times, peaks, needed_operations(policy, batch) / median(rates))


def report(
    options: argparse.Namespace,
    batch: Answers,
    norms: dict[str, float],
    times: dict[str, list[float]],
    peaks: dict[str, int],
    floor: float,
) -> None:
    """Print the table; ratios are of the same round, their spread over rounds in brackets."""
    spread = max(norms.values()) / min(norms.values()) - 1
    if spread > (0.05 if options.dtype == "bfloat16" else 1e-3):
        sys.exit(f"the variants disagree on the norm of the first step's gradient: {norms}")
    rows = []
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(times.get("TRL", seconds), seconds, strict=True)]
        rows.append(
            [
                name,
                f"{median(seconds):.1f} s",
                f"{batch.tokens / median(seconds):.0f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{peaks[name] / GIB:.2f} GiB",
                f"{floor / median(seconds):.0%}",
            ]
        )
    lengths = [len(p) + len(a) for p, a in zip(batch.prompts, batch.answers, strict=True)]
    show(
        f"One optimizer step, {options.preset} {options.dtype}, {options.sequences} answers",
        ["", "a step", "tokens/s", "x TRL", "peak", "of the matmul rate"],
        rows,
        [
            f"{batch.tokens} tokens, {batch.scored} of them in answers; sequences of {min(lengths)} to {max(lengths)}, "
            f"median {median(lengths):.0f}",
            f"micro-batches of {options.rows} answers (TRL) and {options.budget} tokens (ours)",
            f"norms of the first step's gradient within {spread:.0e} of one another",
        ],
    )
    save(
        options.json,
        {"gradient_norms": norms, "seconds": times, "peak_bytes": peaks, "tokens": batch.tokens},
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, rounds=3)
    add_model(parser, "0.1B")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument(
        "--longest", type=int, default=1024, help="tokens of the longest possible answer"
    )
    parser.add_argument("--rows", type=int, default=4, help="answers in one of TRL's micro-batches")
    parser.add_argument("--budget", type=int, default=4096, help="tokens in one of our micro-batches")
    parser.add_argument("--group", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, with --group")
    parser.add_argument(
        "--exactly", type=int, default=0, metavar="N", help="tokens of every prompt with its answer"
    )
    parser.add_argument("--recompute", action="store_true", help="compute activations again in backward")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, help="default: all, and shared with --group"
    )
    options = parser.parse_args()
    options.variants = options.variants or list(VARIANTS if options.group > 1 else VARIANTS[:-1])
    if options.sequences % options.group:
        parser.error("--sequences must be a multiple of --group")
    if options.sequences % options.rows:
        parser.error(
            "--sequences must be a multiple of --rows: TRL weighs answers by their micro-batch's size"
        )
    return options


if __name__ == "__main__":
    main()
