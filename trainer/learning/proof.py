"""The proof of shortcuts that no GPU has confirmed, on a few answers before a run's first update.

Every rank scores some of its answers as the run computes by default, and once more without each
shortcut. Where the log-probabilities and entropies agree up to the rounding of the dtype, the
shortcut stays. Otherwise all ranks leave it out for the rest of the run, since the rank that is
furthest off decides. Of fused kernels and FlashAttention 3, the norms of all parameters' gradients
are compared as well; other gradients are not.

Cost. At most `TOKENS` tokens a rank, or two answers, are passed forward once, and once more for
each shortcut: four times in all, and five times with sinks. With fused kernels and without they are
also passed as in an update: forward, back, which is twice the work, and with checkpointing forward
again. With the 139,264 tokens a rank of gsm8k_qwen3_4b_8gpu.yaml, 40,960 passes of a token come on
top of 417,792: 10 % of the first step's update.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from sharding.ranks import all_reduce_max, all_reduce_sum
from trainer.config.schema import TrainConfig
from trainer.distributed import say
from trainer.errors import UserError
from trainer.learning.batching import Batcher
from trainer.policy.attention import has_flash3
from trainer.policy.fsdp import FsdpPolicy
from trainer.policy.fused import is_fused
from trainer.policy.shortcuts import Shortcut, leave_out, without
from trainer.types import MicroBatch, Policy, Sample

TOKENS = 4096
"""The tokens of the answers that a rank scores; two answers may be longer."""

ROUNDINGS = 8
"""The distance that rounding explains, in units of the dtype's epsilon: 0.06 nats in bfloat16."""

LEAST_LIMIT = 1e-4
"""The least such distance, in nats: that of float32, whose errors add up over layers."""

LABELS = {
    Shortcut.PREFIXES: "common beginnings",
    Shortcut.HEAD: "the output head in blocks",
    Shortcut.SINKS: "attention sinks in the kernel",
    Shortcut.FLASH3: "FlashAttention 3",
    Shortcut.FUSED: "fused kernels",
}


def needs_proof(device: torch.device) -> bool:
    """Return True on a GPU. On a CPU, tests compare every shortcut with plain computation."""
    return device.type == "cuda"


def with_decisions(config: TrainConfig, decisions: dict[str, bool]) -> TrainConfig:
    """Return the recipe with what was decided on shortcuts so far, and let this process compute
    accordingly.
    """
    refused = {Shortcut(name) for name, stays in decisions.items() if not stays}
    leave_out(refused)
    if Shortcut.PREFIXES not in refused:
        return config
    batch = config.batch.model_copy(update={"share_prefixes": False})
    return config.model_copy(update={"batch": batch})


def undecided(config: TrainConfig, policy: Policy, decisions: dict[str, bool]) -> list[Shortcut]:
    """Return the shortcuts that a run takes, and that are yet to be tried; none on a CPU."""
    if not needs_proof(policy.device):
        return []
    taken = [Shortcut.HEAD]
    if config.batch.shared_min is not None:
        taken.append(Shortcut.PREFIXES)
    if any(name.endswith(".sinks") for name, _ in policy.model.named_parameters()):
        # gpt-oss has sinks, for example.
        taken.append(Shortcut.SINKS)
    if has_flash3():
        taken.append(Shortcut.FLASH3)
    if is_fused(config.policy, policy.device.type):
        taken.append(Shortcut.FUSED)
    return [shortcut for shortcut in taken if shortcut not in decisions]


def try_shortcuts(
    shortcuts: list[Shortcut],
    samples: list[Sample],
    config: TrainConfig,
    policy: Policy,
    batcher: Batcher,
    *,
    sharing_required: bool = False,
) -> dict[str, bool]:
    """Score this rank's `samples` with and without each of the shortcuts, and return which of them
    stay. Collective.

    A shortcut that no rank's samples use, for want of targets or of a common beginning, is missing
    from the result. Weights, gradients and random states are as before. With `sharing_required`,
    raises UserError on all ranks if common beginnings are wrong.
    """
    batches = batcher.micro_batches(samples)
    whole = replace(batcher, shared_min=None).micro_batches(samples)
    trees = [
        batch
        for batch in batches
        if batch.layout.pack is not None and batch.layout.pack.tree is not None
    ]
    targets = sum(len(batch.layout.targets) for batch in batches)
    totals = all_reduce_sum({"targets": float(targets), "trees": float(len(trees))})
    usable = [shortcut for shortcut in shortcuts if totals["trees"] or shortcut is not Shortcut.PREFIXES]
    if not usable or not totals["targets"]:
        return {}
    temperature = config.sampling.temperature
    base = scored(policy, batches, temperature)
    limit = max(ROUNDINGS * torch.finfo(getattr(torch, config.policy.dtype)).eps, LEAST_LIMIT)
    decisions: dict[str, bool] = {}
    agreements = []
    for shortcut in usable:
        with without(shortcut):
            plain = scored(policy, whole if shortcut is Shortcut.PREFIXES else batches, temperature)
        farthest = all_reduce_max({"distance": distance(base, plain)})["distance"]
        gradients = 0.0
        if shortcut in (Shortcut.FUSED, Shortcut.FLASH3):
            gradients = gradient_distance(cast(FsdpPolicy, policy), batches, temperature, shortcut)
        means = all_reduce_sum(
            {"with": float(base[0].sum()), "without": float(plain[0].sum()), "K": base.shape[1]}
        )
        decisions[shortcut] = max(farthest, gradients) <= limit
        if decisions[shortcut]:
            agreements.append(f"{LABELS[shortcut]} ({max(farthest, gradients):.2g})")
            continue
        fault = f"norms of gradients with {LABELS[shortcut]} and without are {gradients:.2g} of them"
        if farthest > limit:
            fault = (
                f"log-probabilities average {means['with'] / means['K']:.6g} nats with "
                f"{LABELS[shortcut]} and {means['without'] / means['K']:.6g} without: they are "
                f"{farthest:.2g}"
            )
        fault = f"on this device, {fault} apart, where {config.policy.dtype} explains {limit:.2g}"
        if shortcut is Shortcut.PREFIXES and sharing_required:
            raise UserError(f"batch.share_prefixes is true, but {fault}: set it to false or auto")
        say(f"{fault}; from now on, the run does without")
    if agreements:
        say(
            f"some answers have the same log-probabilities with and without {', '.join(agreements)}, "
            "up to rounding"
        )
    return decisions


def first_few(rows: list[int], lengths: list[int]) -> list[int]:
    """Return the first rows of these lengths, as many as have `TOKENS` tokens, and two of them in
    any case.
    """
    tokens = list(accumulate(lengths[row] for row in rows))
    count = bisect_right(tokens, TOKENS)
    return rows[: max(count, 2)]


def scored(policy: Policy, batches: list[MicroBatch], temperature: float) -> Tensor:
    """Return log-probabilities and entropies of all targets, [2, K] float64, in the order of
    samples. Collective.
    """
    outputs = policy.score(batches, temperature)
    columns: dict[int, Tensor] = {}
    for batch, output in zip(batches, outputs, strict=True):
        table = torch.stack([output.logprobs, output.entropy]).double().cpu()
        masks = batch.loss_mask.bool().cpu()
        for index, row in enumerate(batch.rows):
            columns[row] = table[:, index, masks[index]]
    ordered = [columns[row] for row in sorted(columns)]
    return torch.cat([torch.empty(2, 0, dtype=torch.float64), *ordered], dim=1)


def gradient_distance(
    policy: FsdpPolicy, batches: list[MicroBatch], temperature: float, shortcut: Shortcut
) -> float:
    """Return how far all parameters' norms of gradients with and without a shortcut are apart,
    relative to those without; inf if a number is not finite. Collective.
    """
    faster = policy.gradient_norms(batches, temperature)
    with without(shortcut):
        plain = policy.gradient_norms(batches, temperature)
    return float(((faster - plain).norm() / plain.norm()).nan_to_num(nan=float("inf")))


def distance(base: Tensor, plain: Tensor) -> float:
    """Return the root mean square of a difference [2, K], of its worse row; inf if a number is not
    finite.
    """
    if not base.shape[1]:
        return 0.0
    squares = (base - plain).square().mean(dim=1)
    return float(squares.sqrt().nan_to_num(nan=float("inf")).max())
