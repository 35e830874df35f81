"""InPlacePolicy, whose weights are in memory of another process, equals FsdpPolicy on one rank, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import policy_checks as checks
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.policy import FsdpPolicy, InPlacePolicy
from trainer.policy.hf_format import parameter_names

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make_pair(folder: Path, dtype: str, **settings: object) -> tuple[InPlacePolicy, FsdpPolicy]:
    """Make a policy of each kind with the same settings."""
    config = PolicyConfig(
        **{"dtype": dtype, "lr": 1e-3, "max_grad_norm": 0.3, "weight_decay": 0.1} | settings
    )
    model = ModelConfig(path=str(folder))
    return InPlacePolicy(model, config, checks.CPU), FsdpPolicy(model, config, checks.CPU)


def in_foreign_memory(policy: InPlacePolicy) -> dict[str, Tensor]:
    """Move the policy's weights into one storage, as an engine would provide it, and return the views.

    They begin at multiples of 64 bytes: elsewhere matrix products differ in the last bit.
    """
    weights = parameter_names(policy.model)
    sizes = [-(-weight.numel() // 32) * 32 + 32 for weight in weights.values()]
    storage = torch.full((sum(sizes),), float("nan"), dtype=policy.compute_dtype)
    memory = {
        n: place[: w.numel()]
        for (n, w), place in zip(weights.items(), storage.split(sizes), strict=True)
    }
    policy.compute_in(memory)
    return memory


def masters(policy: FsdpPolicy) -> dict[str, Tensor]:
    return {
        name: getattr(p.detach(), "to_local", lambda p=p: p.detach())()
        for name, p in policy.trained().items()
    }


def assert_alike(one: FsdpPolicy, other: FsdpPolicy) -> None:
    first, second = masters(one), masters(other)
    assert list(first) == list(second)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@DTYPES
@pytest.mark.parametrize(("kind", "tied"), checks.KINDS)
def test_updates_and_scores_equal_fsdp_bit_for_bit(
    one_rank: None, models: Path, kind: str, tied: bool, dtype: str
) -> None:
    in_place, sharded = make_pair(checks.model_folder(models, kind, tied), dtype)
    memory = in_foreign_memory(in_place)
    batches = checks.own_batches(checks.make_samples(), 40)
    assert len(batches) == 4
    for update in range(3):
        results = [
            p.update(batches, checks.make_loss(batches), checks.TEMPERATURE) for p in (in_place, sharded)
        ]
        assert results[0] == results[1] and in_place.version == update + 1
        assert_alike(in_place, sharded)
        for name, master in masters(in_place).items():
            assert torch.equal(memory[name], master.reshape(-1).to(in_place.compute_dtype)), (
                "a step is a sync"
            )
    scores = [[o.logprobs for o in p.score(batches, checks.TEMPERATURE)] for p in (in_place, sharded)]
    assert all(torch.equal(first, second) for first, second in zip(*scores, strict=True))
    assert scores[0][0].any()


@DTYPES
def test_a_skipped_update_does_not_change_the_engines_memory(
    one_rank: None, models: Path, dtype: str
) -> None:
    in_place, _ = make_pair(checks.model_folder(models), dtype, max_skipped_steps=3)
    memory = in_foreign_memory(in_place)
    before = {name: place.clone() for name, place in memory.items()}
    batches = checks.own_batches(checks.make_samples(), 60)
    assert in_place.update(
        batches, checks.make_loss(batches, factor=float("nan")), checks.TEMPERATURE
    ).skipped
    assert all(torch.equal(place, before[name]) for name, place in memory.items())
    assert not in_place.update(batches, checks.make_loss(batches), checks.TEMPERATURE).skipped
    assert not all(torch.equal(place, before[name]) for name, place in memory.items())


@DTYPES
def test_a_restored_policy_makes_the_update_that_restored_fsdp_makes(
    one_rank: None, models: Path, dtype: str
) -> None:
    in_place, sharded = make_pair(checks.model_folder(models), dtype)
    again, sharded_again = make_pair(checks.model_folder(models), dtype)
    memory = in_foreign_memory(again)
    batches = checks.own_batches(checks.make_samples(), 60)
    for policy in (in_place, sharded):
        policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
    again.load_state_dict(in_place.state_dict())
    sharded_again.load_state_dict(sharded.state_dict())
    assert all(
        torch.equal(memory[n], m.reshape(-1).to(again.compute_dtype))
        for n, m in masters(in_place).items()
    )
    results = [
        p.update(batches, checks.make_loss(batches), checks.TEMPERATURE) for p in (again, sharded_again)
    ]
    assert results[0] == results[1]
    assert_alike(again, sharded_again)
    checks.check_sent(make_pair(checks.model_folder(models), dtype)[0])


@DTYPES
def test_masters_and_moments_are_offloaded_and_the_weights_stay(
    one_rank: None, models: Path, dtype: str
) -> None:
    away, _ = make_pair(checks.model_folder(models), dtype, offload="all")
    stays, _ = make_pair(checks.model_folder(models), dtype)
    memory = in_foreign_memory(away)
    batches = checks.own_batches(checks.make_samples(), 60)
    elements = sum(p.numel() for p in away.masters.values())
    for _ in range(3):
        results = [
            p.update(batches, checks.make_loss(batches), checks.TEMPERATURE) for p in (away, stays)
        ]
        assert results[0] == results[1]
        assert away.release(weights=False) == 8 * elements  # the bytes of both moments
        assert checks.gathered(away) == checks.gathered(stays), (
            "a sync must still have the masters to compare with"
        )
        assert away.release(weights=True) == (4 * elements if dtype == "bfloat16" else 0)
        assert all(place.isfinite().all() and place.any() for place in memory.values())
        away.restore()
    assert_alike(away, stays)


@DTYPES
def test_the_value_head_learns_as_under_fsdp(one_rank: None, models: Path, dtype: str) -> None:
    config = PolicyConfig(dtype=dtype, lr=1e-2)
    model = ModelConfig(path=str(checks.model_folder(models)))
    in_place = InPlacePolicy(model, config, checks.CPU, value_head=True)
    sharded = FsdpPolicy(model, config, checks.CPU, value_head=True)
    batches = checks.own_batches(checks.make_samples(), 60)

    def loss(batch, outputs):  # type: ignore[no-untyped-def]
        return ((outputs.values - 1.5) ** 2 * batch.loss_mask).sum() - outputs.logprobs.sum(), {}

    for _ in range(2):
        assert in_place.update(batches, loss, 1.0) == sharded.update(batches, loss, 1.0)
    assert_alike(in_place, sharded)
    assert "value_head.weight" in in_place.masters and in_place.masters["value_head.weight"].any()
    assert "value_head.weight" not in dict(in_place.named_parameters())
