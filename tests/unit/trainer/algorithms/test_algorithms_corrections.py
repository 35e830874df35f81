"""Rollout corrections, length shaping and dynamic sampling equal loops written from their definitions."""

import math

import pytest
import torch

from trainer.algorithms import corrections, shaping
from trainer.algorithms.advantages import informative
from trainer.algorithms.shaping import SamplingDecision, dynamic_sampling

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


def log_probabilities() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore


def ratio_by_definition(old: torch.Tensor, engine: torch.Tensor, row: int, t: int, level: str) -> float:
    differences = [float(old[row, i] - engine[row, i]) for i in range(5) if MASK[row, i]]
    if level == "token":
        return math.exp(float(old[row, t] - engine[row, t]))
    return math.prod(map(math.exp, differences)) ** (1 / len(differences) if level == "geometric" else 1)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_rollout_ratios_against_their_definition(level: str) -> None:
    old, engine = log_probabilities()
    got = corrections.rollout_ratios(old.requires_grad_(), engine, MASK, level)
    assert not got.requires_grad
    for row in range(4):
        for t in range(5):
            expected = ratio_by_definition(old.detach(), engine, row, t, level) if MASK[row, t] else 1.0
            assert float(got[row, t]) == pytest.approx(expected, rel=1e-9)


def test_values_of_masked_tokens_do_not_matter() -> None:
    old, engine = log_probabilities()
    other = torch.where(MASK.bool(), engine, 1e9)
    for level in ("token", "geometric", "sequence"):
        one, two = (corrections.rollout_ratios(old, e, MASK, level) for e in (engine, other))
        assert torch.equal(one, two)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_extreme_ratios_stay_finite_on_every_level(level: str) -> None:
    old = torch.tensor([[0.0, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    for one, other in ((old, -old), (-old, old), (old, old.flip(1))):
        ratios = corrections.rollout_ratios(one, other, torch.ones(2, 3), level)
        assert torch.isfinite(ratios).all()


def test_geometric_masking_with_token_weights_and_its_metrics_against_loops() -> None:
    """Ratios of one level decide which tokens are kept, ratios of another level weight them."""
    old, engine = log_probabilities()
    ratios = corrections.rollout_ratios(old, engine, MASK)
    kept = corrections.within(corrections.rollout_ratios(old, engine, MASK, "geometric"), 0.6, 1.8)
    sums = {key: float(v) for key, v in corrections.correction_sums(ratios, 1.5, kept, MASK).items()}
    weights, capped, dropped, dropped_sequences = [], 0, 0, 0
    for row in (0, 1, 3):
        tokens = [t for t in range(5) if MASK[row, t]]
        if not 0.6 <= ratio_by_definition(old, engine, row, 0, "geometric") <= 1.8:
            dropped += len(tokens)
            dropped_sequences += 1
            continue
        row_ratios = [ratio_by_definition(old, engine, row, t, "token") for t in tokens]
        capped += sum(1 for r in row_ratios if r > 1.5)
        weights += [min(r, 1.5) for r in row_ratios]
    assert dropped and capped and len(weights) > 1
    metrics = corrections.correction_metrics(sums)
    assert metrics == pytest.approx(
        {
            "correction/weight": sum(weights) / len(weights),
            "correction/effective": sum(weights) ** 2 / sum(w * w for w in weights) / len(weights),
            "correction/capped": capped / 9,
            "correction/dropped_tokens": dropped / 9,
            "correction/dropped_sequences": dropped_sequences / 3,
        }
    )


def test_correction_sums_add_up_over_any_split() -> None:
    old, engine = log_probabilities()
    ratios = corrections.rollout_ratios(old, engine, MASK)
    kept = corrections.within(ratios, 0.5, 2.0)
    expected = corrections.correction_sums(ratios, 1.5, kept, MASK)
    for key, value in expected.items():
        rows = (
            corrections.correction_sums(ratios[[i]], 1.5, kept[[i]], MASK[[i]])[key] for i in range(4)
        )
        torch.testing.assert_close(sum(rows), value)


def test_correction_metrics_of_equal_policies_and_of_no_tokens() -> None:
    ones, nothing = torch.ones(2, 3), torch.zeros(2, 3)
    for mask, share in ((ones, 1.0), (nothing, 0.0)):
        sums = corrections.correction_sums(ones, math.inf, ones.bool(), mask)
        metrics = corrections.correction_metrics({key: float(value) for key, value in sums.items()})
        assert metrics.pop("correction/weight") == metrics.pop("correction/effective") == share
        assert set(metrics.values()) == {0.0}


def test_stale_samples_are_left_out_only_where_they_are_bad() -> None:
    """Four samples: too far on average and bad; too far but good; near enough; far only where it is masked."""
    policy = torch.tensor([[-3.0, -3.0], [-3.0, -3.0], [-1.4, -1.4], [-3.0, -1.0]])
    engine = torch.full((4, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 1]])
    kept = corrections.not_stale(
        policy, engine, torch.tensor([-1.0, 1.0, -1.0, -1.0]), mask, threshold=0.5
    )
    assert [bool(row[m.bool()].all()) for row, m in zip(kept, mask, strict=True)] == [
        False,
        True,
        True,
        True,
    ]
    assert kept.shape == mask.shape
    by_token = corrections.not_stale(
        policy, engine, torch.tensor([[-1.0, 1.0]] * 4), mask, threshold=0.5
    )
    assert by_token[0].tolist() == [False, True]


@pytest.mark.parametrize("margin", [0, 3, 10])
def test_soft_overlong_penalty_against_its_three_cases(margin: int) -> None:
    for length, got in enumerate(shaping.soft_overlong_penalty(torch.arange(15), 10, margin).tolist()):
        if length <= 10 - margin:
            expected = 0.0
        elif length <= 10:
            expected = (10 - margin - length) / margin
        else:
            expected = -1.0
        assert got == pytest.approx(expected)


def test_length_normalized_rewards_against_a_loop() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.0, 2.0]])
    lengths = torch.tensor([[10, 30, 5], [0, 0, 0]])
    got = shaping.length_normalized(rewards, lengths, 0.5)
    for p in range(2):
        mean = max(sum(lengths[p].tolist()) / 3, 1.0)
        for g in range(3):
            expected = float(rewards[p, g]) / (1 + 0.5 * float(lengths[p, g]) / mean)
            assert float(got[p, g]) == pytest.approx(expected)
    assert torch.equal(shaping.length_normalized(rewards, lengths, 0.0), rewards)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        shaping.length_normalized(torch.tensor([[-1.0]]), torch.tensor([[3]]), 0.5)


def test_groups_are_informative_where_rewards_differ() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.1, 0.1]])
    assert informative(rewards).tolist() == [False, True, False]
    assert informative(torch.tensor([[3.0]])).tolist() == [False]


@pytest.mark.parametrize(
    ("signals", "rounds", "expected"),
    [
        ("110101", 1, SamplingDecision([0, 1, 3], 0, 0)),  # enough: the earliest, the rest is dropped
        ("010", 1, SamplingDecision([1], 3, 0)),  # two are missing, half as many again are sampled
        ("000", 1, SamplingDecision([], 5, 0)),
        ("010001", 3, SamplingDecision([1, 5], 0, 1)),  # the bound: fewer than wanted
        ("000", 3, SamplingDecision([], 0, 3)),
        ("", 3, SamplingDecision([], 0, 3)),
        ("111", 3, SamplingDecision([0, 1, 2], 0, 0)),
    ],
)
def test_dynamic_sampling_ends_at_its_bound(
    signals: str, rounds: int, expected: SamplingDecision
) -> None:
    got = dynamic_sampling(
        [s == "1" for s in signals], wanted=3, rounds=rounds, max_rounds=3, oversampling=1.5
    )
    assert got == expected


def test_at_the_bound_a_step_can_be_filled_up() -> None:
    def decide(signals: str) -> SamplingDecision:
        return dynamic_sampling([s == "1" for s in signals], 3, 2, 2, at_bound="fill")

    assert decide("00010") == SamplingDecision([0, 1, 3], 0, 2)
    assert decide("01") == SamplingDecision([0, 1], 0, 2)
    assert decide("01110") == SamplingDecision([1, 2, 3], 0, 0)
