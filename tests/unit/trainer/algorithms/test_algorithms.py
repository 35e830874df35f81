"""Compare each formula with a double loop written from its definition."""

import math
import statistics

import pytest
import torch

from trainer.algorithms import advantages, aggregation, corrections, kl, losses
from trainer.algorithms.losses import MAX_LOG_RATIO, log_ratio

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float32)


def count(mask: torch.Tensor, name: str) -> float:
    """Return the divisor of a loss: the number of trainable tokens, or of sequences that have any."""
    return float(mask.sum() if name == "token_mean" else mask.any(dim=1).sum())


def test_group_relative_advantages_agree_with_the_statistics_module() -> None:
    rewards = [[1.0, 0.0, 0.5, 0.25], [3.0, -2.0, 0.1, 7.5]]
    for normalize in (True, False):
        got = advantages.group_relative(torch.tensor(rewards), normalize)
        for row, group in zip(got.tolist(), rewards, strict=True):
            scale = statistics.pstdev(group) + advantages.EPSILON if normalize else 1.0
            assert row == pytest.approx([(r - statistics.fmean(group)) / scale for r in group], abs=1e-5)


def test_groups_without_a_signal_give_exactly_zero() -> None:
    """The mean of eight rewards of 0.1 differs from 0.1 by rounding, which a tiny standard deviation must not
    amplify.
    """
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
    ratios = log_ratio(logprobs, old, torch.ones(6, 5))
    loss, clipped = losses.clipped_surrogate(
        ratios, advantage if per_token else advantage[:, 0], 0.2, 0.28
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
        loss, _ = losses.clipped_surrogate(
            log_ratio(logprobs, old, torch.ones(1, 3)), torch.tensor([a]), 0.2, 0.28
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert torch.isfinite(kl.k3(logprobs, old)).all()
    assert torch.isfinite(corrections.rollout_ratios(logprobs, old, torch.ones(1, 3))).all()


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGPROBS, OLD = noise(1, 4, 4) - 2, noise(2, 4, 4) - 2


@pytest.mark.parametrize("level", ["geometric", "sequence"])
def test_a_sequences_ratio_and_its_gradient_against_autograd(level: str) -> None:
    """Each token has the sequence's value; over the sequence the gradients add up to that of the ratio itself."""
    logprobs = LOGPROBS.clone().requires_grad_()
    got = log_ratio(logprobs, OLD, MASK, level)
    (by_token,) = torch.autograd.grad(got.exp().sum(), logprobs)
    for i in range(4):
        tokens = [j for j in range(4) if MASK[i, j]]
        total = sum((logprobs[i, j] - OLD[i, j] for j in tokens), torch.zeros((), dtype=torch.float64))
        ratio = torch.exp(total / max(1, len(tokens)) if level == "geometric" else total)
        for j in range(4):
            assert float(got[i, j]) == pytest.approx(float(ratio.log()) if MASK[i, j] else 0.0, abs=1e-9)
            # For the geometric mean a token's own share of the gradient is 1/n; the mean over n tokens brings it back.
            assert float(by_token[i, j]) == pytest.approx(float(ratio) if MASK[i, j] else 0.0, rel=1e-9)


def test_a_token_ratio_beyond_its_bound_has_no_gradient() -> None:
    logprobs = torch.tensor([[0.0, 0.0, -1.0]], requires_grad=True)
    got = log_ratio(logprobs, torch.tensor([[-50.0, 50.0, -1.5]]), torch.ones(1, 3))
    assert got.tolist() == [[MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.5]]
    assert torch.autograd.grad(got.sum(), logprobs)[0].tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("name", ["dual clip", "cispo", "sapo", "reinforce"])
def test_losses_and_their_gradients_against_a_loop(name: str) -> None:
    logprobs, advantage = LOGPROBS.clone().requires_grad_(), noise(3, 4, 4)
    ratio = log_ratio(logprobs, OLD, torch.ones(4, 4))
    loss, clipped = {
        "dual clip": lambda: losses.clipped_surrogate(ratio, advantage, 0.2, 0.28, dual_clip=2.0),
        "cispo": lambda: losses.cispo(ratio, logprobs, advantage, 0.5, 1.0),
        "sapo": lambda: losses.sapo(ratio, advantage, (1.0, 3.0)),
        "reinforce": lambda: losses.reinforce(logprobs, advantage),
    }[name]()
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    for i in range(4):
        for j in range(4):
            r, a, logp = (
                math.exp(LOGPROBS[i, j] - OLD[i, j]),
                float(advantage[i, j]),
                float(LOGPROBS[i, j]),
            )
            cut, value, slope = by_definition(name, r, a, logp)
            assert bool(clipped[i, j]) == cut
            assert float(loss[i, j]) == pytest.approx(value, rel=1e-9)
            assert float(gradient[i, j]) == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert name in ("sapo", "reinforce") or 0 < clipped.sum() < 16


def by_definition(name: str, r: float, a: float, logp: float) -> tuple[bool, float, float]:
    """Return whether bounds took effect, the loss, and its derivative by the log-probability (dr/dlogp = r)."""
    if name == "dual clip":
        cut = r > 1.28 if a > 0 else r < 0.8 or r > 2.0
        value = (
            -min(r * a, min(max(r, 0.8), 1.28) * a)
            if a > 0
            else -max(min(r * a, max(r, 0.8) * a), 2.0 * a)
        )
        return cut, value, 0.0 if cut else -r * a
    if name == "cispo":
        weight = min(max(r, 0.5), 2.0)
        return weight != r, -weight * a * logp, -weight * a
    if name == "sapo":
        t = 1.0 if a > 0 else 3.0
        s = 1 / (1 + math.exp(-t * (r - 1)))
        return False, -4 / t * s * a, -4 * s * (1 - s) * r * a
    return False, -a * logp, -a


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(level: str) -> None:
    logprobs, advantage = LOGPROBS.clone().requires_grad_(), noise(3, 4)
    ratio = log_ratio(logprobs, LOGPROBS, MASK, level)
    expected = torch.autograd.grad((losses.reinforce(logprobs, advantage)[0] * MASK).sum(), logprobs)[0]
    for loss, _ in (
        losses.clipped_surrogate(ratio, advantage, 0.2, 0.28, 3.0),
        losses.cispo(ratio, logprobs, advantage, 1.0, 4.0),
        losses.sapo(ratio, advantage),
    ):
        (gradient,) = torch.autograd.grad((loss * MASK).sum(), logprobs, retain_graph=True)
        torch.testing.assert_close(gradient, expected)


def test_gspo_with_turn_advantages_weights_each_token_by_its_advantage() -> None:
    """The sequence decides about clipping, the turn about direction: a turn without advantage is not moved."""
    logprobs = LOGPROBS.clone().requires_grad_()
    advantage = torch.zeros(4, 4, dtype=torch.float64)
    advantage[1, 2:] = -1.0
    loss, _ = losses.clipped_surrogate(
        log_ratio(logprobs, LOGPROBS, MASK, "geometric"), advantage, 3e-4, 4e-4
    )
    gradient = torch.autograd.grad(loss.sum(), logprobs)[0]
    assert gradient.tolist() == [[0.0] * 4, [0.0, 0.0, 1.0, 1.0], [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_clipped_value_loss_against_a_loop(clip: float | None) -> None:
    value, old, target = noise(4, 3, 5).requires_grad_(), noise(5, 3, 5), noise(6, 3, 5)
    loss, clipped = losses.clipped_value_loss(value, old, target, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    for i in range(3):
        for j in range(5):
            v, o, r = float(value[i, j]), float(old[i, j]), float(target[i, j])
            near = v if clip is None else min(max(v, o - clip), o + clip)
            cut = (near - r) ** 2 > (v - r) ** 2
            assert bool(clipped[i, j]) == cut
            assert float(loss[i, j]) == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2)
            assert float(gradient[i, j]) == pytest.approx(0.0 if cut else v - r)
    assert bool(clipped.any()) == (clip is not None)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_the_entropy_threshold_leaves_the_share_asked_for(share: float) -> None:
    entropies = noise(7, 6, 7).abs()
    mask = noise(8, 6, 7) > -0.5
    ordered = sorted(entropies[mask].tolist())
    threshold = losses.entropy_threshold(len(ordered), ordered.__getitem__, share)
    assert threshold == pytest.approx(float(torch.quantile(entropies[mask], 1 - share)))
    chosen = losses.high_entropy_mask(entropies, mask, threshold)
    expected = {value for value in entropies[mask].tolist() if value >= threshold}
    assert set(entropies[chosen].tolist()) == expected
    assert len(expected) == max(1, math.floor(share * (int(mask.sum()) - 1)) + 1)


def test_entropy_without_tokens_and_its_bonus() -> None:
    assert losses.entropy_threshold(0, [].__getitem__, 0.2) == math.inf
    assert not losses.high_entropy_mask(torch.ones(2, 2), torch.ones(2, 2), math.inf).any()
    assert losses.entropy_bonus(torch.tensor([[1.0, 2.0]]), 0.5).tolist() == [[-0.5, -1.0]]


LOGITS, REFERENCE = noise(9, 5), noise(10, 5).log_softmax(0)


def expected_gradient(estimator: str, sampler: torch.Tensor | None = None) -> torch.Tensor:
    """Return the estimator's gradient with respect to logits, averaged over every token the sampling policy might
    draw.
    """
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn = policy.detach() if sampler is None else sampler
    estimate = kl.divergence(estimator, policy, drawn, REFERENCE)  # type: ignore[arg-type]
    return torch.autograd.grad((drawn.exp() * estimate).sum(), logits)[0]


def true_gradient() -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    return torch.autograd.grad((policy.exp() * (policy - REFERENCE)).sum(), logits)[0]


def test_gradients_of_kl_estimators_compared_with_that_of_the_divergence() -> None:
    """The gradients of k2 and the weighted k3 equal the divergence's, k1's is zero on average, and k3's is
    another one.
    """
    torch.testing.assert_close(expected_gradient("k2"), true_gradient())
    torch.testing.assert_close(expected_gradient("unbiased_k3"), true_gradient())
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(5, dtype=torch.float64))
    assert (expected_gradient("k3") - true_gradient()).abs().max() > 0.05


def test_the_weighted_k3_is_unbiased_for_samples_of_another_policy() -> None:
    sampler = noise(11, 5).log_softmax(0)
    policy = LOGITS.log_softmax(0)
    estimate = sampler.exp() * kl.unbiased_k3(policy, sampler, REFERENCE)
    torch.testing.assert_close(estimate.sum(), (policy.exp() * (policy - REFERENCE)).sum())
    torch.testing.assert_close(expected_gradient("unbiased_k3", sampler), true_gradient())
    assert (expected_gradient("k2", sampler) - true_gradient()).abs().max() > 0.05


def test_the_weighted_k3_has_no_gradient_beyond_its_bound_and_the_exact_one_within() -> None:
    """As NeMo RL's `calculate_kl` (nemo_rl/algorithms/utils.py, its test "detaches importance sampling when clamped").

    At d = reference - policy and r = 1, (r (exp(d) - d - 1))' = exp(d) - d - 1 + 1 - exp(d) = -d.
    """
    distances = torch.tensor([20.5, 25.0, -20.5, 19.5, -19.5, 3.0], dtype=torch.float64)
    policy = (-30.0 * torch.ones_like(distances)).requires_grad_()
    reference = policy.detach() + distances
    estimate = kl.unbiased_k3(policy, policy.detach(), reference)
    bounded = distances.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    torch.testing.assert_close(estimate.detach(), bounded.exp() - bounded - 1)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    # Within the bound two numbers of 3e8 cancel, which leaves float64 some 1e-7.
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 0.0, -19.5, 19.5, -3.0], abs=1e-6)


def test_estimators_by_name_and_their_clamp() -> None:
    policy, old, reference = LOGPROBS.clone().requires_grad_(), OLD, noise(12, 4, 4) - 2
    difference = LOGPROBS - reference
    expected = {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": (-difference).exp() + difference - 1,
        "unbiased_k3": (LOGPROBS - OLD).exp() * ((-difference).exp() + difference - 1),
    }
    for name, value in expected.items():
        plain = kl.divergence(name, policy, old, reference)  # type: ignore[arg-type]
        torch.testing.assert_close(plain.detach(), value)
        bounded = kl.divergence(name, policy, old, reference, clamp=0.5)  # type: ignore[arg-type]
        torch.testing.assert_close(bounded.detach(), value.clamp(-0.5, 0.5))
        (gradient,) = torch.autograd.grad(bounded.sum(), policy)
        beyond = value.abs() > 0.5
        assert beyond.any() and not gradient[beyond].any() and gradient[~beyond].any()


def test_the_kl_penalty_is_subtracted_from_the_reward() -> None:
    estimate = LOGPROBS.clone().requires_grad_()
    got = kl.penalty(estimate, MASK, 0.1)
    assert not got.requires_grad
    expected = [
        [-0.1 * float(LOGPROBS[i, j]) if MASK[i, j] else 0.0 for j in range(4)] for i in range(4)
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_k3_is_the_expectation_of_the_divergence() -> None:
    p, q = (
        torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64),
        torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64),
    )
    estimates = kl.k3(p.log(), q.log())
    assert float((p * estimates).sum()) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)
    assert (estimates >= 0).all()
    assert torch.equal(kl.k3(p.log(), p.log()), torch.zeros(3, dtype=torch.float64))


def test_weights_agree_with_a_loop() -> None:
    """Fully masked rows count for nothing, in the numerator and in the denominator."""
    numbers = torch.arange(16, dtype=torch.float32).reshape(4, 4) - 5
    rows = [[float(numbers[i, j]) for j in range(4) if MASK[i, j]] for i in range(4)]
    tokens = [v for row in rows for v in row]
    expected = {
        "token_mean": sum(tokens) / len(tokens),
        "sequence_mean": sum(sum(r) / len(r) for r in rows if r) / sum(1 for r in rows if r),
        "sequence_sum": sum(tokens) / sum(1 for r in rows if r),
        "fixed_length": sum(tokens) / (sum(1 for r in rows if r) * 16),
    }
    for name, value in expected.items():
        denominator = count(MASK, name)
        assert float(
            (numbers * aggregation.weights(MASK, name, denominator, denominator, 16)).sum()
        ) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation_weights_without_tokens_are_zero(name: str) -> None:
    mask = torch.zeros(2, 3)
    assert torch.equal(aggregation.weights(mask, name, 0.0, 0.0, 16), torch.zeros(2, 3))


def test_truncated_importance_weights_against_a_loop() -> None:
    old = torch.randn(3, 4, requires_grad=True)
    engine = torch.randn(3, 4)
    got = corrections.rollout_ratios(old, engine, torch.ones(3, 4)).clamp(max=1.5)
    assert not got.requires_grad
    for i in range(3):
        for j in range(4):
            expected = min(math.exp(float(old[i, j]) - float(engine[i, j])), 1.5)
            assert float(got[i, j]) == pytest.approx(expected, rel=1e-5)
