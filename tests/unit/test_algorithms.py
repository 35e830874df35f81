"""Each formula against a double loop written from its definition."""

import math
import statistics

import pytest
import torch

from trainer.algorithms import advantages, aggregation, corrections, kl, losses


def test_group_relative_against_statistics() -> None:
    rewards = [[1.0, 0.0, 0.5, 0.25], [3.0, -2.0, 0.1, 7.5]]
    for normalize in (True, False):
        got = advantages.group_relative(torch.tensor(rewards), normalize)
        for row, group in zip(got.tolist(), rewards, strict=True):
            scale = statistics.pstdev(group) + advantages.EPSILON if normalize else 1.0
            assert row == pytest.approx([(r - statistics.fmean(group)) / scale for r in group], abs=1e-5)


def test_p15_groups_without_a_signal_give_exactly_zero() -> None:
    """0.1 is not representable: the mean of eight differs from it, which a tiny deviation must not blow up."""
    rewards = torch.tensor([[0.1] * 8, [1e8] * 8, [0.0] * 8])
    for normalize in (True, False):
        assert torch.equal(advantages.group_relative(rewards, normalize), torch.zeros(3, 8))
    assert torch.equal(advantages.group_relative(torch.tensor([[5.0]]), True), torch.zeros(1, 1))


@pytest.mark.parametrize("per_token", [False, True])
def test_clipped_loss_and_its_gradient_against_a_loop(per_token: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    old = logprobs.detach() + 0.4 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    advantage = torch.randn(6, 5 if per_token else 1, generator=generator, dtype=torch.float64)
    loss, clipped = losses.clipped_policy_gradient(
        logprobs, old, advantage if per_token else advantage[:, 0], 0.2, 0.28
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert 0 < int(clipped.sum()) < clipped.numel()
    for i in range(6):
        for j in range(5):
            a = float(advantage[i, j if per_token else 0])
            ratio = math.exp(float(logprobs[i, j]) - float(old[i, j]))
            bounded = min(max(ratio, 0.8), 1.28)
            is_clipped = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
            assert float(loss[i, j]) == pytest.approx(-min(ratio * a, bounded * a), abs=1e-12)
            assert bool(clipped[i, j]) == is_clipped
            assert float(gradient[i, j]) == pytest.approx(0.0 if is_clipped else -ratio * a, abs=1e-12)


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([[0.0, -1e4, 0.0]], requires_grad=True)
    old = torch.tensor([[-1e4, 0.0, 0.0]])
    for a in (1.0, -1.0):
        loss, _ = losses.clipped_policy_gradient(logprobs, old, torch.tensor([a]), 0.2, 0.28)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert torch.isfinite(kl.k3(logprobs, old)).all()
    assert torch.isfinite(corrections.truncated_importance_weights(logprobs, old, cap=2.0)).all()


def test_k3_is_the_expectation_of_the_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    estimates = kl.k3(p.log(), q.log())
    assert float((p * estimates).sum()) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)
    assert (estimates >= 0).all()
    assert torch.equal(kl.k3(p.log(), p.log()), torch.zeros(3, dtype=torch.float64))


MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float32)


def test_weights_against_a_loop() -> None:
    """Fully masked rows count for nothing, in the numerator and in the denominator."""
    values = torch.arange(16, dtype=torch.float32).reshape(4, 4) - 5
    rows = [[float(values[i, j]) for j in range(4) if MASK[i, j]] for i in range(4)]
    tokens = [v for row in rows for v in row]
    expected = {
        "token_mean": sum(tokens) / len(tokens),
        "sequence_mean": sum(sum(r) / len(r) for r in rows if r) / sum(1 for r in rows if r),
    }
    for name, value in expected.items():
        denominator = float(aggregation.count(MASK, name))
        assert float((values * aggregation.weights(MASK, name, denominator)).sum()) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_p14_weights_add_up_over_any_split(name: str) -> None:
    values = torch.randn(4, 4)
    denominator = float(aggregation.count(MASK, name))
    whole = (values * aggregation.weights(MASK, name, denominator)).sum()
    for parts in ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2], [0, 1, 3]]):
        assert sum(float(aggregation.count(MASK[p], name)) for p in parts) == denominator
        pieces = [(values[p] * aggregation.weights(MASK[p], name, denominator)).sum() for p in parts]
        torch.testing.assert_close(torch.stack(pieces).sum(), whole)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_nothing_to_train_on_weighs_nothing(name: str) -> None:
    mask = torch.zeros(2, 3)
    assert float(aggregation.count(mask, name)) == 0.0
    assert torch.equal(aggregation.weights(mask, name, 0.0), torch.zeros(2, 3))


def test_truncated_importance_weights_against_a_loop() -> None:
    old = torch.randn(3, 4, requires_grad=True)
    engine = torch.randn(3, 4)
    got = corrections.truncated_importance_weights(old, engine, cap=1.5)
    assert not got.requires_grad
    for i in range(3):
        for j in range(4):
            expected = min(math.exp(float(old[i, j]) - float(engine[i, j])), 1.5)
            assert float(got[i, j]) == pytest.approx(expected, rel=1e-5)


def test_p12_gap_metrics_against_a_loop() -> None:
    trainer, engine = torch.randn(200), torch.randn(200) * 0.1
    differences = [float(t) - float(e) for t, e in zip(trainer, engine, strict=True)]
    distances = sorted(abs(d) for d in differences)
    got = corrections.gap_metrics(trainer, engine, 0.2, 0.28)
    assert got["gap/mean"] == pytest.approx(statistics.fmean(distances), abs=1e-6)
    assert got["gap/p95"] == pytest.approx(distances[189], abs=1e-6)
    assert got["gap/max"] == pytest.approx(distances[-1], abs=1e-6)
    outside = sum(1 for d in differences if not 0.8 <= math.exp(d) <= 1.28)
    assert got["gap/outside_clip"] == pytest.approx(outside / 200)


def test_gap_metrics_of_few_tokens() -> None:
    assert set(corrections.gap_metrics(torch.empty(0), torch.empty(0), 0.2, 0.2).values()) == {0.0}
    one = corrections.gap_metrics(torch.tensor([-1.0]), torch.tensor([-1.5]), 0.2, 0.2)
    assert one == {"gap/mean": 0.5, "gap/p95": 0.5, "gap/max": 0.5, "gap/outside_clip": 1.0}
