"""Advantages and returns equal loops written from their definitions."""

import statistics

import pytest
import torch

from trainer.algorithms import advantages

Tensor = torch.Tensor
GROUPS = [[1.0, 0.0, 0.0, 1.0], [3.0, 2.0, 0.5, 7.5], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


ESTIMATORS = {
    "group_relative": advantages.group_relative,
    "without std": lambda rewards: advantages.group_relative(rewards, normalize_std=False),
    "leave_one_out": advantages.leave_one_out,
    "max_rl": advantages.max_rl,
    "normalize_then_sum": lambda rewards: advantages.normalize_then_sum(
        rewards.unsqueeze(0), torch.ones(1)
    ),
}


def test_leave_one_out_against_a_loop() -> None:
    for got, group in zip(advantages.leave_one_out(torch.tensor(GROUPS)).tolist(), GROUPS, strict=True):
        baselines = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(len(group))]
        assert got == pytest.approx([r - b for r, b in zip(group, baselines, strict=True)], abs=1e-6)


def test_max_rl_against_a_loop() -> None:
    for got, group in zip(advantages.max_rl(torch.tensor(GROUPS)).tolist(), GROUPS, strict=True):
        mean = statistics.fmean(group)
        expected = [(r - mean) / mean if mean and max(group) > min(group) else 0.0 for r in group]
        assert got == pytest.approx(expected, abs=1e-6)


def test_max_rl_is_the_mean_over_successes() -> None:
    """For 0/1 rewards, MaxRL averages score functions over successes, less their plain mean (a control variate)."""
    scores = torch.randn(8)
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
    estimate = (advantages.max_rl(rewards.unsqueeze(0))[0] * scores).mean()
    torch.testing.assert_close(estimate, scores[rewards.bool()].mean() - scores.mean())


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match="at least 0, not -0.5"):
        advantages.max_rl(torch.tensor([[1.0, -0.5]]))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[[5.0]], [[0.1] * 8], [[1e8] * 3], [[0.0] * 4], [[1 / 3] * 7]])
def test_groups_of_one_and_without_spread_get_exactly_zero(
    name: str, rewards: list[list[float]]
) -> None:
    assert torch.equal(ESTIMATORS[name](torch.tensor(rewards)), torch.zeros(1, len(rewards[0])))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_does_not_see_the_others(name: str) -> None:
    together = ESTIMATORS[name](torch.tensor(GROUPS))
    apart = torch.cat([ESTIMATORS[name](torch.tensor([group])) for group in GROUPS])
    torch.testing.assert_close(together, apart)


def test_normalize_then_sum_against_a_loop() -> None:
    rewards = torch.tensor([GROUPS, [[g * 1000 for g in reversed(group)] for group in GROUPS]])
    got = advantages.normalize_then_sum(rewards, torch.tensor([1.0, 0.25]))
    for p in range(4):
        for g in range(4):
            expected = 0.0
            for reward, weight in zip(rewards.tolist(), (1.0, 0.25), strict=True):
                spread = statistics.pstdev(reward[p])
                if max(reward[p]) > min(reward[p]):
                    expected += (
                        weight
                        * (reward[p][g] - statistics.fmean(reward[p]))
                        / (spread + advantages.EPSILON)
                    )
            assert float(got[p, g]) == pytest.approx(expected, abs=1e-4)


def test_reinforce_pp_with_a_baseline_is_the_centred_rewards_whitened_over_the_step() -> None:
    centred = advantages.group_relative(torch.tensor(GROUPS), normalize_std=False)
    total = advantages.moments(centred[:1]) + advantages.moments(centred[1:])
    got = advantages.whiten(centred, torch.ones_like(centred), total).flatten().tolist()
    flat = [r - statistics.fmean(group) for group in GROUPS for r in group]
    scale = statistics.pstdev(flat) + advantages.EPSILON
    assert got == pytest.approx([(value - statistics.fmean(flat)) / scale for value in flat], abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (50, 40)])
def test_a_step_without_spread_is_whitened_to_exactly_zero(value: float, shape: tuple[int, int]) -> None:
    """Rounding makes the difference of two sums of squares nonzero, or even negative, where there is no spread."""
    values, mask, zeros = (
        torch.full(shape, value, dtype=torch.float64),
        torch.ones(shape),
        torch.zeros(shape),
    )
    assert torch.equal(advantages.whiten(values, mask, advantages.moments(values, mask)), zeros)
    assert torch.equal(advantages.whiten(values, zeros, advantages.moments(values, zeros)), zeros)


# Two turns with a tool between them; one token; nothing; one long turn; three turns.
MASK = torch.tensor(
    [
        [0, 1, 1, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0, 0, 0, 1],
    ]
)
TURNS = [[[1, 2], [5, 6]], [[3]], [], [[0, 1, 2, 3, 4, 5, 6, 7]], [[0], [2, 3], [7]]]


def sampled(row: int) -> list[int]:
    return [t for turn in TURNS[row] for t in turn]


def test_turn_values_reach_the_right_tokens() -> None:
    values = torch.arange(1.0, 16.0).reshape(5, 3)
    ends, spread = torch.zeros(5, 8), torch.zeros(5, 8)
    for row, turns in enumerate(TURNS):
        for turn, tokens in enumerate(turns):
            ends[row, tokens[-1]] = values[row, turn]
            spread[row, tokens] = values[row, turn]
    assert torch.equal(advantages.at_turn_ends(values, MASK), ends)
    assert torch.equal(advantages.spread_over_turns(values, MASK), spread)
    with pytest.raises(ValueError, match="3 turns, but there are values for 2 only"):
        advantages.spread_over_turns(values[:, :2], MASK)


def test_an_outcome_is_put_on_the_last_sampled_token() -> None:
    expected = torch.zeros(5, 8)
    for row in range(5):
        if sampled(row):
            expected[row, sampled(row)[-1]] = row + 1.0
    assert torch.equal(advantages.at_sequence_end(torch.arange(1.0, 6.0), MASK), expected)
    assert torch.equal(advantages.at_sequence_end(torch.arange(1.0, 6.0), MASK.float()), expected)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_returns_to_go_skip_tokens_of_tools(discount: float) -> None:
    rewards = torch.randn(5, 8)
    got = advantages.returns_to_go(rewards, MASK, discount)
    expected = torch.zeros(5, 8)
    for row in range(5):
        total = 0.0
        for t in reversed(sampled(row)):
            total = float(rewards[row, t]) + discount * total
            expected[row, t] = total
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_against_a_double_loop(discount: float, trace: float) -> None:
    rewards, values = torch.randn(5, 8), torch.randn(5, 8)
    got, targets = advantages.gae(rewards, values, MASK, discount, trace)
    expected = torch.zeros(5, 8)
    for row in range(5):
        tokens = sampled(row)
        padded_values = [float(values[row, t]) for t in tokens] + [0.0]
        surprises = [
            float(rewards[row, t]) + discount * padded_values[i + 1] - padded_values[i]
            for i, t in enumerate(tokens)
        ]
        for i, t in enumerate(tokens):
            expected[row, t] = sum(
                (discount * trace) ** (j - i) * surprises[j] for j in range(i, len(tokens))
            )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(targets, (expected + values) * MASK)


def test_gae_with_full_traces_is_the_return_less_the_value() -> None:
    rewards, values = torch.randn(5, 8), torch.randn(5, 8)
    got, targets = advantages.gae(rewards, values, MASK, 0.97, 1.0)
    to_go = advantages.returns_to_go(rewards, MASK, 0.97)
    torch.testing.assert_close(targets, to_go)
    torch.testing.assert_close(got, (to_go - values) * MASK)


@pytest.mark.parametrize("normalize", [True, False])
def test_turn_relative_against_a_loop(normalize: bool) -> None:
    """One of three samples stops after the first turn, and only one takes the third."""
    taken = torch.tensor([[[1, 1, 0], [1, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0], [1, 1, 0]]])
    values = torch.randn(2, 3, 3)
    values[1, :, 1] = 0.1
    got = advantages.turn_relative(values, taken, normalize)
    for p in range(2):
        for k in range(3):
            there = [g for g in range(3) if taken[p, g, k]]
            group = [float(values[p, g, k]) for g in there]
            for g in range(3):
                expected = 0.0
                if g in there and max(group) > min(group):
                    scale = statistics.pstdev(group) + 1e-6 if normalize else 1.0
                    expected = (float(values[p, g, k]) - statistics.fmean(group)) / scale
                assert float(got[p, g, k]) == pytest.approx(expected, abs=1e-4)
    assert torch.equal(got[1, :, 1], torch.zeros(3)) and torch.equal(got[0, :, 2], torch.zeros(3))


@pytest.mark.parametrize("size", [1, 3, 7])
def test_turns_with_equal_returns_get_exactly_zero(size: int) -> None:
    """Equal returns give zero although the rounded mean differs from some of them."""
    alike = torch.randn(20, 1, 4).expand(20, size, 4)
    for normalize in (True, False):
        assert not advantages.turn_relative(alike, torch.ones(20, size, 4), normalize).any()


def test_turn_relative_with_one_turn_is_group_relative() -> None:
    rewards = torch.tensor(GROUPS)
    got = advantages.turn_relative(rewards.unsqueeze(2), torch.ones(4, 4, 1)).squeeze(2)
    torch.testing.assert_close(got, advantages.group_relative(rewards), rtol=1e-5, atol=1e-5)
