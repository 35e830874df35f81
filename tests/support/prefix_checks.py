"""Checks of policies that compute common beginnings once, for test_shared_ranks.py, on one and on two ranks.

What is compared are gradients of the same samples in packs of whole sequences, which other tests compare with plain
Transformers.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharding.ranks import all_reduce_sum, rank, sum_counts, world_size
from tests.support import policy_checks as checks
from tests.support.critic_checks import (
    captured_gradients,
    make_critic,
    make_reward_model,
    squared_error,
)
from tests.support.families import make_family
from tests.support.rank_checks import Checks
from tests.support.recipes import make_config
from tests.support.sequence_checks import transcripts
from tests.support.shared_answers import LEAST, group, turns
from trainer import sft
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.learning.batching import Batcher, micro_batches
from trainer.policy import FrozenPolicy, FsdpPolicy, Outputs
from trainer.policy.routing import balance, loads_of
from trainer.types import MicroBatch, RouteFormat, Sample

SAMPLES = [*turns(5, seed=3), *group(4, 30, [10, 6]), *group(5, 22, [8, 15], seed=1)]
HYBRIDS = ("qwen3_5", "qwen3_next", "granite4")  # families
LIMIT = 5e-6  # of a gradient's difference, in relative norm
Batches = list[MicroBatch]


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float = LIMIT) -> None:
    """Each parameter's gradient differs by at most `limit` in relative norm."""
    assert got.keys() == wanted.keys() and got
    for name, gradient in wanted.items():
        if not name.endswith("k_proj.bias"):  # zero but for rounding
            distance = float((got[name] - gradient).norm())
            assert distance <= limit * float(gradient.norm()), (
                f"{name}: {distance / float(gradient.norm())}"
            )


def both(samples: list[Sample], budget: int, ways: int = 1) -> tuple[Batches, Batches]:
    """Micro-batches of whole sequences, and of the same with common beginnings shared."""
    whole, shared = (
        micro_batches(samples, budget, 0, checks.CPU, packing=True, ways=ways, shared_min=least)
        for least in (None, LEAST)
    )
    assert sum(map(tokens, shared)) < 0.8 * sum(map(tokens, whole)) or not samples
    return whole, shared


def tokens(batch: MicroBatch) -> int:
    """Return the number of tokens that are forwarded on this rank."""
    assert batch.layout.pack is not None
    return len(batch.layout.pack.tokens)


def applied(
    model: Any, batches: Batches, *rest: Any, ways: int = 1, loss: Any = None
) -> dict[str, Tensor]:
    """Return the gradients of an update with the loss of `policy_checks`, or another."""
    checks.ways = ways
    loss = loss or checks.make_loss(batches)
    checks.ways = 1
    return captured_gradients(model, partial(model.update, batches, loss, *rest))


def check_policy(
    folder: Path, kind: str, lora: int = 0, ways: int = 1, split: bool = False, **settings: Any
) -> None:
    """Score and gradients of an update; with `split`, each rank has some of a group's answers, else whole groups."""
    source = checks.model_folder(folder, kind, True)
    owners = world_size() // ways
    mine = [
        s
        for n, s in enumerate(SAMPLES)
        if (n if split else len(s.input_ids) // 9) % owners == rank() // ways
    ]
    whole, shared = both(mine, 60 if not ways > 1 else 90, ways)
    found = []
    for batches in (whole, shared):
        config = PolicyConfig(**{"dtype": "float32", "lr": 1e-3, "max_grad_norm": 1e9} | settings)  # type: ignore[arg-type]
        targets = ["in_proj", "q_proj"] if kind in HYBRIDS else ["q_proj", "v_proj"]
        adapters = LoraConfig(rank=lora, target_modules=targets)
        policy = FsdpPolicy(ModelConfig(path=str(source)), config, checks.CPU, lora=adapters)
        scores = policy.score(batches, checks.TEMPERATURE)
        checks.ways = ways
        loss = checks.make_loss(batches)
        checks.ways = 1
        gradients = applied(
            policy, batches, checks.TEMPERATURE, loss=partial(compared, loss, iter(scores))
        )
        found.append((gradients, by_row(batches, [score.logprobs for score in scores])))
    for row, logprobs in found[0][1].items():
        torch.testing.assert_close(found[1][1][row], logprobs, atol=1e-5, rtol=0)
    assert_close(found[1][0], found[0][0])


def compared(loss: Any, scores: Iterator[Outputs], batch: MicroBatch, out: Outputs) -> Any:
    """Return the loss; the first ratio of an update is exactly 1."""
    assert torch.equal(out.logprobs.detach(), next(scores).logprobs)
    return loss(batch, out)


def loss_of_values(error: Any, batch: MicroBatch, out: Outputs) -> Any:
    """Return the loss of the values of a head on the policy's trunk."""
    assert out.values is not None
    return error(batch, out.values)


def distance(
    scores: Iterator[Outputs], batch: MicroBatch, out: Outputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared distance of a student's log-probabilities from its teacher's."""
    return ((out.logprobs - next(scores).logprobs) ** 2 * batch.loss_mask).sum() / 2, {}


def by_row(batches: Batches, tables: list[Tensor]) -> dict[int, Tensor]:
    """Return the numbers of each sample, by its index."""
    return {
        row: line[: length - 1]
        for batch, table in zip(batches, tables, strict=True)
        for row, line, length in zip(batch.rows, table, batch.lengths, strict=False)
    }


def check_others(folder: Path, kind: str = "qwen2", teacher_kind: str = "gemma3") -> None:
    """Values of a critic and of a head on the policy's trunk, and scores of a reference and a teacher; updates."""
    whole, shared = both(SAMPLES[rank() :: world_size()], 60)
    source = checks.model_folder(folder, kind, True)
    found: list[list[Any]] = []
    for batches in (whole, shared):
        critic = make_critic(folder / f"{kind}_reward")
        values = by_row(batches, critic.score(batches))
        error = squared_error(batches)
        gradients = [applied(critic, batches, loss=error)]
        config = PolicyConfig(dtype="float32", lr=1e-2, max_grad_norm=1e9)
        policy = FsdpPolicy(ModelConfig(path=str(source)), config, checks.CPU, value_head=True)
        with torch.no_grad():
            policy.trained()["value_head.weight"].fill_(0.3)

        gradients.append(applied(policy, batches, 1.0, loss=partial(loss_of_values, error)))
        reference = FrozenPolicy(ModelConfig(path=str(source)), config, checks.CPU)
        teacher = FrozenPolicy(
            ModelConfig(path=str(checks.model_folder(folder, teacher_kind, True))), config, checks.CPU
        )
        taught = teacher.score(batches, 1.0)
        student = checks.make_policy(source)
        gradients.append(applied(student, batches, 1.0, loss=partial(distance, iter(taught))))
        logprobs = [
            torch.stack([one.logprobs, other.logprobs], 2)
            for one, other in zip(reference.score(batches, 1.0), taught, strict=True)
        ]
        found.append([values, by_row(batches, logprobs), *gradients])
    for (row, one), (_, other) in zip(
        sorted(found[0][0].items()), sorted(found[1][0].items()), strict=True
    ):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=2e-6)  # values up to 10
        torch.testing.assert_close(found[1][1][row], found[0][1][row], atol=1e-5, rtol=0)
    for one, other in zip(found[0][2:], found[1][2:], strict=True):
        assert_close(other, one)


def supervised(
    policy: FsdpPolicy, rows: list[sft.Transcript], batcher: Batcher, figures: list[Any]
) -> None:
    """A supervised step, whose figures it appends."""
    figures.append(sft.update(policy, rows, batcher, 0))


def check_sft(folder: Path) -> None:
    """A supervised step on rows with common beginnings, which are dealt out as units."""
    found = []
    for share in (False, True):
        batch = {"tokens_per_micro_batch": 80, "share_prefixes": share, "shared_tokens_min": LEAST}
        config = make_config(batch=batch)
        policy = checks.make_policy(checks.model_folder(folder, "qwen2", True))
        rows = transcripts(SAMPLES)
        figures: list[Any] = []
        gradients = captured_gradients(
            policy, partial(supervised, policy, rows, Batcher.of(config, policy, 0), figures)
        )
        found.append((gradients, figures[0].loss, policy.work))
    assert abs(found[1][1] - found[0][1]) <= 1e-6 * abs(found[0][1])
    assert_close(found[1][0], found[0][0])
    logical = [
        all_reduce_sum({"tokens": float(work.tokens), "flops": work.flops}) for _, _, work in found
    ]
    assert (
        logical[0]["tokens"] == logical[1]["tokens"] and logical[1]["flops"] < 0.9 * logical[0]["flops"]
    )


def routed(form: RouteFormat, samples: list[Sample], differ: tuple[int, ...] = ()) -> list[Sample]:
    """Return the samples with routes that depend on beginnings; those of the rows `differ` are others in one place."""
    routed_samples = []
    for number, sample in enumerate(samples):
        sample = copy.copy(sample)
        rows = []
        for end in range(1, len(sample.input_ids)):
            generator = torch.Generator().manual_seed(hash(tuple(sample.input_ids[:end])) % 2**31)
            scores = torch.rand(len(form.layers), form.experts, generator=generator)
            rows.append(scores.topk(form.top_k).indices)
        if number in differ:
            rows[9][0] = (rows[9][0] + 1) % form.experts
        sample.routes = torch.stack(rows).to(form.dtype)
        routed_samples.append(sample)
    return routed_samples


def check_mixture(folder: Path, ways: int = 1, kind: str = "qwen3_moe") -> None:
    """A mixture with its own routes, and with recorded ones and a balance loss: gradients, loads and the loss."""
    source = checks.model_folder(folder, kind, False)
    form = checks.make_policy(source).routing.format  # type: ignore[union-attr]
    for given in (False, True, None):  # by the router, by the engine, and recorded in a pass before
        every = routed(form, SAMPLES) if given else SAMPLES
        whole, shared = both(every[rank() // ways :: world_size() // ways], 90, ways)
        found: list[Any] = []
        loads: Tensor | None = None
        for batches in (whole, shared):
            model = ModelConfig(path=str(source), routes="recorded" if given is None else "own")
            policy = FsdpPolicy(model, PolicyConfig(dtype="float32", max_grad_norm=1e9), checks.CPU)
            assert policy.routing is not None
            if given is None:
                for batch, out in zip(batches, policy.score(batches, checks.TEMPERATURE), strict=True):
                    batch.routes = out.routes
                policy.routing.take_counts()
            if given is not False:
                loads = sum_counts(loads_of(batches, form))
                policy.routing.pull = balance(loads, form, coef=0.5)
            gradients = applied(policy, batches, checks.TEMPERATURE, ways=ways)
            counts, differ, pulled = policy.routing.take_counts()
            pulled = all_reduce_sum({"pulled": pulled})["pulled"]
            found.append((gradients, sum_counts(counts), loads, differ, pulled))
        (one, counts, loads, differ, pulled), (other, *figures) = found
        assert_close(other, one)
        assert torch.equal(figures[0], counts)
        if given is not False:
            assert torch.equal(figures[1], loads) and (differ > 0) == bool(given)
            assert abs(figures[3] - pulled) <= 1e-6 * pulled


def check_differing_routes(folder: Path) -> None:
    """A sibling with one other route shares the tokens before it, and no others."""
    source = checks.model_folder(folder, "qwen3_moe", False)
    form = checks.make_policy(source).routing.format  # type: ignore[union-attr]
    samples = routed(form, group(2, 20, [6]), differ=(1,))
    (batch,) = micro_batches(samples, 1000, 0, checks.CPU, 1, packing=True, shared_min=1)
    assert tokens(batch) == 2 * 25 - 9
    (plain,) = micro_batches(group(2, 20, [6]), 1000, 0, checks.CPU, 1, packing=True, shared_min=1)
    assert tokens(plain) == 2 * 25 - 20
    found = []
    for least in (None, 1):
        batches = micro_batches(samples, 1000, 0, checks.CPU, packing=True, shared_min=least)
        found.append(applied(checks.make_policy(source), batches, checks.TEMPERATURE))
    assert_close(found[1], found[0])


def make_models(folder: Path) -> None:
    """Write the models that are checked here beside those of `policy_checks`: hybrids and critics."""
    for family in HYBRIDS:
        make_family(family, folder / family)
    for kind in ("qwen2", "qwen3_next"):
        make_reward_model(folder, kind)


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    return {
        "whole groups": lambda: check_policy(folder, "qwen2"),
        "split groups": lambda: check_policy(folder, "qwen2", split=True),
        "adapters": lambda: check_policy(folder, "qwen3", lora=2),
        "critics and references": lambda: check_others(folder),
        "a hybrid": lambda: check_policy(folder, "qwen3_5", split=True),
        "a hybrid with adapters": lambda: check_policy(folder, "granite4", lora=2),
        "a hybrid mixture": lambda: check_mixture(folder, kind="qwen3_next"),
        "critics and references of hybrids": lambda: check_others(folder, "qwen3_next", "granite4"),
        "supervised step": lambda: check_sft(folder),
        "mixture": lambda: check_mixture(folder),
        "one pack on two ranks": lambda: check_policy(folder, "qwen2", ways=2),
        "one pack with windows on two ranks": lambda: check_policy(folder, "gemma3", ways=2),
        "one pack of a mixture on two ranks": lambda: check_mixture(folder, ways=2),
        "a part without targets": lambda: check_part_without_targets(folder),
    }


def check_part_without_targets(folder: Path) -> None:
    """The first of two ranks has nothing but a part of the prompt."""
    samples = group(2, 40, [5])
    source = checks.model_folder(folder, "qwen2", True)
    found = []
    for least in (None, LEAST):
        batches = micro_batches(samples, 200, 0, checks.CPU, packing=True, ways=2, shared_min=least)
        assert least is None or rank() or not len(batches[0].layout.targets)
        found.append(applied(checks.make_policy(source), batches, checks.TEMPERATURE, ways=2))
    assert_close(found[1], found[0])
