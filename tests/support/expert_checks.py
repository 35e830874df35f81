"""Checks of experts in parallel for test_experts.py: two and four ranks against plain Transformers in one process.

Most are the checks of policies whose ranks gather experts, run once more with `policy.expert_parallel`.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from sharding.ranks import rank
from tests.support import critic_checks, sequence_checks, three_steps
from tests.support import policy_checks as checks
from tests.support.counted_collectives import check_traffic
from tests.support.rank_checks import Checks
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.learning.batching import micro_batches
from trainer.policy import FrozenPolicy, FsdpPolicy
from trainer.run import checkpoint
from trainer.types import RouteFormat, Sample

MIXTURE = "qwen3_moe", False
EXPERTS = {"even": 8, "uneven": 6}
"""Experts of the mixtures; four ranks in groups of two hold two each, or two and one."""


def make_mixtures(models: Path) -> None:
    """Write a mixture for each of EXPERTS, in a folder of its own."""
    for name, experts in EXPERTS.items():
        checks.make_model(MIXTURE[0], checks.model_folder(models / name, *MIXTURE), MIXTURE[1], experts)


def make_policy(folder: Path, size: int, **settings: Any) -> FsdpPolicy:
    """Return a policy whose experts are split over groups of `size` ranks, with the settings of `three_steps`."""
    source = checks.model_folder(folder, *MIXTURE)
    return checks.make_policy(source, **three_steps.SETTINGS | settings, expert_parallel=size)


def check_next_steps(policy: FsdpPolicy, folder: Path, first: int, last: int) -> None:
    """Steps `first` to `last` of 3 are those of a single process."""
    three_steps.check_next_steps(policy, checks.model_folder(folder, *MIXTURE), first, last)


def check_handed_over(folder: Path, size: int, step: int) -> None:
    """Continue from a checkpoint of step `step` that other ranks saved, and save the next for others."""
    policy = make_policy(folder, size)
    checkpoint.load(folder / f"step_{step}", {"policy": policy})
    check_next_steps(policy, folder, step + 1, step + 1)
    checkpoint.save(folder, step + 1, {"policy": policy}, {})


def check_first_step(folder: Path, size: int) -> None:
    """The first step, saved for other ranks."""
    policy = make_policy(folder, size)
    check_next_steps(policy, folder, 1, 1)
    checkpoint.save(folder, 1, {"policy": policy}, {})


def check_busy_rank(folder: Path, size: int) -> None:
    """Gradients are right where all tokens go to the first two experts, and other ranks' experts have none."""

    def to_first(form: RouteFormat) -> list[Sample]:
        samples = checks.make_samples()
        for sample in samples:
            rows = len(sample.input_ids) - 1, len(form.layers), 1
            sample.routes = (
                torch.arange(form.top_k, dtype=form.dtype).expand(*rows[:2], form.top_k).contiguous()
            )
        return samples

    with patch.object(checks, "routed_samples", to_first):
        checks.check_routed(folder, expert_parallel=size, activation_checkpointing="full")


def check_idle_ranks(folder: Path, size: int) -> None:
    """Ranks without a sequence have their experts compute for the others."""
    source, samples = checks.model_folder(folder, *MIXTURE), checks.make_samples([9, 4, 12])
    batches = micro_batches(samples if rank() == 0 else [], 12, 0, checks.CPU, packing=True)
    policy = checks.make_policy(source, expert_parallel=size)
    got = checks.policy_gradients(policy, batches, "token_mean")
    checks.assert_gradients_equal(got, checks.plain_gradients(source, samples, "token_mean"))


def check_scores(folder: Path, size: int) -> None:
    """A reference's log-probabilities, in float32 and bfloat16, are those of experts that are gathered."""
    model = ModelConfig(path=str(checks.model_folder(folder, *MIXTURE)))
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 0.05)):
        batches = checks.own_batches(checks.make_samples(), 33, packing=True)
        split, whole = (
            FrozenPolicy(model, PolicyConfig(dtype=dtype, expert_parallel=ways), checks.CPU).score(
                batches, 1.0
            )
            for ways in (size, 1)
        )
        for got, wanted in zip(split, whole, strict=True):
            torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=tolerance, rtol=1e-6)


def check_adapters(folder: Path, size: int) -> None:
    """Adapters beside split experts learn as beside gathered ones."""
    model = ModelConfig(path=str(checks.model_folder(folder, *MIXTURE)))
    batches, results = checks.own_batches(checks.make_samples(), 33, packing=True), []
    for ways in (size, 1):
        settings = PolicyConfig(dtype="float32", lr=1e-3, expert_parallel=ways)
        lora = LoraConfig(rank=2, target_modules=["q_proj", "v_proj"])
        policy = FsdpPolicy(model, settings, checks.CPU, lora=lora)
        for _ in range(2):
            policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
        results.append(checks.weights(policy))
    for name, weight in results[1].items():
        torch.testing.assert_close(results[0][name], weight, atol=1e-6, rtol=1e-6)


def checks_of(even: Path) -> Checks:
    """Return the checks that two and four ranks share."""
    return {
        "routed": lambda: checks.check_routed(
            even, expert_parallel=2, activation_checkpointing="every_second"
        ),
        "routed, products kept": lambda: checks.check_routed(
            even, expert_parallel=2, activation_checkpointing="products"
        ),
        "shared sequences": sequence_checks.sharing(
            2, lambda: sequence_checks.check_update(even, *MIXTURE, 33, expert_parallel=2)
        ),
        "sent": lambda: checks.check_sent(make_policy(even, 2)),
        "planned collectives": lambda: check_traffic(even, False, MIXTURE[0], expert_parallel=2),
    }


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    even = folder / "even"
    source = checks.model_folder(even, *MIXTURE)
    return checks_of(even) | {
        "first step": lambda: check_first_step(even, 2),
        "busy rank": lambda: check_busy_rank(even, 2),
        "idle ranks": lambda: check_idle_ranks(even, 2),
        "scores": lambda: check_scores(even, 2),
        "export": lambda: checks.check_export(even, *MIXTURE, "bfloat16", expert_parallel=2),
        "adapters": lambda: check_adapters(even, 2),
        "critic": lambda: critic_checks.check_values_and_gradients(even, MIXTURE[0], expert_parallel=2),
        "host": lambda: checks.check_gradients(
            even, *MIXTURE, 33, "token_mean", True, expert_parallel=2, update_on="host"
        ),
        "shifts": lambda: checks.check_shifts(
            lambda what: checks.make_policy(source, offload=what, expert_parallel=2),
            lambda policy: [p.to_local() for _, p in policy.named_parameters()],
        ),
    }


def four_ranks(folder: Path) -> Checks:
    """Return the checks of four ranks."""
    even, uneven = (folder / name for name in EXPERTS)
    return checks_of(even) | {
        "three steps": lambda: check_next_steps(
            make_policy(uneven, 2, activation_checkpointing="full"), uneven, 1, 3
        ),
        "uneven sent": lambda: checks.check_sent(make_policy(uneven, 2)),
        "second step": lambda: check_handed_over(even, 4, 1),
        "replicas": lambda: check_next_steps(make_policy(even, 2, shard_size=2), even, 1, 1),
        "replicas sent": lambda: checks.check_sent(make_policy(even, 2, shard_size=2)),
    }
