"""Checks of ranks that share micro-batches, for test_sequence_parallel.py on two and on four ranks.

Most are the checks of policies whose ranks share nothing, run once more, against plain Transformers in one process.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sharding.ranks import rank, sum_counts, world_size
from tests.support import critic_checks, deepspeed_checks, lora_checks
from tests.support import policy_checks as checks
from tests.support.rank_checks import Checks
from trainer import sft
from trainer.config.schema import TrainConfig
from trainer.learning.batching import Batcher, micro_batches
from trainer.policy import FsdpPolicy
from trainer.policy.routing import loads_of
from trainer.run import checkpoint
from trainer.types import MicroBatch, Sample

BUDGETS = (20, 33, 10_000)  # the longest sequence has 30 tokens


def sharing(ways: int, check: Callable[[], None]) -> Callable[[], None]:
    """Wrap a check so that it runs with groups of `ways` ranks."""

    def run() -> None:
        checks.ways = ways
        try:
            check()
        finally:
            checks.ways = 1

    return run


def check_scores(folder: Path, kind: str, tied: bool) -> None:
    """Log-probabilities and entropies of whole sequences are, on every rank, those of the same packs on one rank."""
    policy = checks.make_policy(checks.model_folder(folder, kind, tied))
    samples = checks.own_samples(checks.make_samples())
    for budget in BUDGETS:
        shared, alone = (
            micro_batches(samples, budget, 0, checks.CPU, packing=True, ways=ways)
            for ways in (checks.ways, 1)
        )
        for batch, one in zip(shared, alone, strict=True):
            check_cut(batch, one)
        both = (policy.score(batches, checks.TEMPERATURE) for batches in (shared, alone))
        for got, wanted in zip(*both, strict=True):
            assert wanted.logprobs.any() or not wanted.logprobs.numel() or not samples
            torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(got.entropy, wanted.entropy, atol=1e-6, rtol=1e-6)


def check_cut(batch: MicroBatch, one: MicroBatch) -> None:
    """Lengths, masks and rows are those of a micro-batch of one rank; input and targets are this rank's part."""
    assert (batch.lengths, batch.rows) == (one.lengths, one.rows) and torch.equal(
        batch.loss_mask, one.loss_mask
    )
    assert batch.layout.pack is not None and one.layout.pack is not None
    assert sum(batch.layout.pack.parts) == max(checks.ways, len(one.layout.pack.tokens))
    assert len(batch.layout.pack.tokens) == batch.layout.pack.parts[rank() % checks.ways]
    assert len(batch.layout.targets) < len(one.layout.targets) or len(one.layout.targets) < 2


def check_update(
    folder: Path, kind: str, tied: bool, budget: int, name: str = "token_mean", **settings: str
) -> None:
    """Loss, norm, figures and gradients of an update are those of plain Transformers in one process."""
    source, samples = checks.model_folder(folder, kind, tied), checks.make_samples()
    policy, batches, stats = (
        checks.make_policy(source, **settings),
        checks.own_batches(samples, budget),
        [],
    )
    loss = checks.make_loss(batches, name)
    got = critic_checks.captured_gradients(
        policy, lambda: stats.append(policy.update(batches, loss, checks.TEMPERATURE))
    )
    expected = checks.plain_gradients(source, samples, name)
    checks.assert_gradients_equal(got, expected)
    distance, norm = (
        torch.stack([g.norm() for g in gradients]).norm().item()
        for gradients in ([got[key] - expected[key] for key in expected], expected.values())
    )
    assert distance <= 1e-6 * norm
    assert stats[0].grad_norm == pytest.approx(norm, rel=1e-6)
    plain = checks.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert stats[0].loss == pytest.approx(
        checks.plain_loss(plain, samples, name).item(), rel=1e-6, abs=1e-6
    )
    assert stats[0].sums["tokens"] == sum(sum(s.loss_mask[1:]) for s in samples)
    assert policy.work.tokens == sum(
        b.layout.pack.parts[rank() % checks.ways] for b in batches if b.layout.pack
    )


def check_routes(folder: Path) -> None:
    """A rank applies the given routes of its own tokens, and each token counts once among the experts' loads."""
    policy = checks.make_policy(checks.model_folder(folder, "qwen3_moe", False))
    assert policy.routing is not None
    format, generator, samples = (
        policy.routing.format,
        torch.Generator().manual_seed(4),
        checks.make_samples(),
    )
    for sample in samples:
        scores = torch.rand(
            len(sample.input_ids) - 1, len(format.layers), format.experts, generator=generator
        )
        sample.routes = scores.topk(format.top_k).indices.to(format.dtype)
    scored = []
    for ways in (1, checks.ways):
        batches = micro_batches(samples, 33, 0, checks.CPU, packing=True, ways=ways)
        outputs, local_loads = policy.score(batches, checks.TEMPERATURE), loads_of(batches, format)
        loads, differ, _ = policy.routing.take_counts()
        assert torch.equal(loads, local_loads) and differ
        scored.append((outputs, sum_counts(loads) // (checks.ways // ways)))
    (alone, loads), (shared, shared_loads) = scored
    assert torch.equal(loads, shared_loads)
    for got, wanted in zip(shared, alone, strict=True):
        torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-6, rtol=1e-6)


def check_memory(folder: Path) -> None:
    """For backward, each of two ranks keeps little more than half of what one rank would keep of a long sequence."""
    policy = checks.make_policy(checks.model_folder(folder, "qwen3", True))
    samples, kept = checks.make_samples([1000]), []
    for ways in (1, checks.ways):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batches = micro_batches(samples, 1000, 0, checks.CPU, packing=True, ways=ways)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
        kept.append(sum(storages.values()))
    assert 0.4 * kept[0] < kept[1] <= 0.6 * kept[0], kept


def check_idle_ranks(folder: Path) -> None:
    """Ranks without a sequence join every collective: only the first group has any, as short as they can be."""
    samples = checks.make_samples([2, 2, 3])
    source = checks.model_folder(folder, "qwen3", True)
    mine = samples if rank() < checks.ways else []
    batches = micro_batches(mine, 2, 0, checks.CPU, packing=True, ways=checks.ways)
    assert len(batches) == 3
    policy = checks.make_policy(source, activation_checkpointing="full")
    got = checks.policy_gradients(policy, batches, "token_mean")
    checks.assert_gradients_equal(got, checks.plain_gradients(source, samples, "token_mean"))


def check_goes_on_alone(folder: Path) -> None:
    """A checkpoint of ranks that share continues on ranks that do not, with the same second update."""
    source, ways = checks.model_folder(folder), checks.ways

    def step(policy: FsdpPolicy) -> float:
        batches = checks.own_batches(checks.make_samples(), 60, packing=True)
        return policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE).loss

    straight, other = checks.make_policy(source), checks.make_policy(source)
    step(straight)
    saved = checkpoint.save(folder / f"shared_{world_size()}_{ways}", 1, {"policy": straight}, {})
    checks.ways = 1
    checkpoint.load(saved, {"policy": other})
    alone = step(other)
    checks.ways = ways
    assert step(straight) == pytest.approx(alone, rel=1e-6)
    wanted = checks.weights(straight)
    for name, weight in checks.weights(other).items():
        torch.testing.assert_close(weight, wanted[name], atol=2e-5, rtol=1e-5)


def transcripts(samples: list[Sample]) -> list[sft.Transcript]:
    """Return the samples as rows of supervised fine-tuning."""
    return [sft.Transcript(**vars(sample)) for sample in samples]


def check_sft(folder: Path) -> None:
    """A supervised step, and the held-out loss, are those of ranks that share nothing."""
    source, results = checks.model_folder(folder), []
    for ways in (1, checks.ways):
        sections = {
            "model": {"path": str(source)},
            "data": {"path": "d"},
            "policy": {"sequence_parallel": ways},
        }
        config = TrainConfig.model_validate(sections | {"batch": {"tokens_per_micro_batch": 33}})
        policy = checks.make_policy(source, eps=1e-3)
        meter = SimpleNamespace(phase=lambda name: nullcontext())
        batcher = Batcher.of(config, policy, 0)
        run = SimpleNamespace(config=config, policy=policy, batcher=batcher, meter=meter)
        run.held_out = {"held_out": transcripts(checks.make_samples([5, 9, 4]))}
        held_out = sft.SftRun.evaluate(run)["eval/loss"]  # type: ignore[arg-type]
        stats = sft.update(policy, transcripts(checks.make_samples()), batcher, 0)
        results.append(([stats.loss, stats.grad_norm, held_out], checks.weights(policy)))
    (figures, wanted), (shared_figures, weights) = results
    assert shared_figures == pytest.approx(figures, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-6, rtol=1e-6)


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    run: Checks = {}
    for kind, tied in checks.KINDS:
        run[f"scores {kind} {tied}"] = lambda k=kind, t=tied: check_scores(folder, k, t)
        run[f"update {kind} {tied}"] = lambda k=kind, t=tied: check_update(
            folder, k, t, 33, "sequence_mean"
        )
    for budget in BUDGETS:
        run[f"update, budget {budget}"] = lambda b=budget: check_update(folder, "qwen2", True, b)
    for layers in ("products", "every_second", "full"):
        run[f"recomputed {layers}"] = lambda layers=layers: check_update(
            folder, "qwen3", True, 33, activation_checkpointing=layers
        )
    run["memory for backward"] = lambda: check_memory(folder)
    run["given routes"] = lambda: check_routes(folder)
    run["critic"] = lambda: critic_checks.check_values_and_gradients(folder, "qwen2")
    run["shared trunk"] = lambda: critic_checks.check_head_on_shared_trunk(folder)
    run["resumed without sharing"] = lambda: check_goes_on_alone(folder)
    run["supervised step"] = lambda: check_sft(folder)
    for stage in deepspeed_checks.STAGES:
        run[f"zero {stage}"] = lambda s=stage: deepspeed_checks.check_three_steps(
            folder, s, "qwen2", True
        )
    for backend in ("fsdp", "zero 3"):
        run[f"lora {backend}"] = lambda b=backend: lora_checks.check_steps(folder, b)
    return {name: sharing(2, check) for name, check in run.items()}


def four_ranks(folder: Path) -> Checks:
    """Return the checks of larger groups on four ranks."""
    run: Checks = {}
    for ways in (2, 4):
        for kind, tied in (("qwen2", True), ("gemma3", True)):
            run[f"update {kind} {ways}"] = sharing(
                ways, lambda k=kind, t=tied: check_update(folder, k, t, 20)
            )
        run[f"idle {ways}"] = sharing(ways, lambda: check_idle_ranks(folder))
    run["scores 4"] = sharing(4, lambda: check_scores(folder, "qwen3", True))
    run["replicas"] = sharing(2, lambda: check_update(folder, "qwen3", True, 33, shard_size=2))
    return run
