"""pass@k and majority@k equal averages over every subset."""

import random
from collections import Counter
from itertools import combinations

import pytest

from trainer.evaluation import majority_at_k, pass_at_k

CASES = [
    ("aaabbc", "110000"),
    ("abcdef", "001000"),
    ("aabb..", "110000"),  # a dot abstains
    ("......", "000000"),
    ("aaaaaa", "111111"),
    ("aaabbb", "101000"),  # the judge contradicts itself
    ("a", "1"),
    (".", "1"),  # right, but with nothing to vote for
]


def unpack(case: tuple[str, str]) -> tuple[list[str | None], list[bool]]:
    return [None if letter == "." else letter for letter in case[0]], [digit == "1" for digit in case[1]]


def vote(votes: list[str | None], right: list[bool], chosen: tuple[int, ...]) -> float:
    """Return the value of one vote: the mean over the winners of the share of their votes that were judged right."""
    counts = Counter(votes[i] for i in chosen if votes[i] is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    worth = [[right[i] for i in range(len(votes)) if votes[i] == answer] for answer in winners]
    return sum(sum(part) / len(part) for part in worth) / len(winners) if winners else 0.0


@pytest.mark.parametrize("case", CASES)
def test_estimators_equal_the_mean_over_all_subsets(case: tuple[str, str]) -> None:
    votes, right = unpack(case)
    for k in range(1, len(votes) + 1):
        subsets = list(combinations(range(len(votes)), k))
        passed = sum(any(right[i] for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(len(right), sum(right), k) == pytest.approx(passed, abs=1e-12)
        voted = sum(vote(votes, right, subset) for subset in subsets) / len(subsets)
        assert majority_at_k(votes, right, k) == pytest.approx(voted, abs=1e-12)


def test_random_votes_equal_the_mean_over_all_subsets() -> None:
    draw = random.Random(0)
    for _ in range(60):
        n = draw.randint(2, 8)
        votes = [draw.choice(["x", "y", "z", None]) for _ in range(n)]
        right = [vote == "x" for vote in votes]
        k = draw.randint(1, n)
        subsets = list(combinations(range(n), k))
        voted = sum(vote(votes, right, subset) for subset in subsets) / len(subsets)
        assert majority_at_k(votes, right, k) == pytest.approx(voted, abs=1e-12)


def test_pass_at_1_and_majority_at_1_are_the_share_of_right_answers() -> None:
    assert pass_at_k(8, 3, 1) == 3 / 8
    assert majority_at_k(["1", "2", "1", "3"], [True, False, True, False], 1) == pytest.approx(0.5)


def test_all_answers_vote_as_one_would_count_them() -> None:
    assert majority_at_k(["4", "5", "4"], [True, False, True], 3) == 1.0
    assert majority_at_k(["4", "5"], [True, False], 2) == 0.5


def test_many_answers_lose_no_digits() -> None:
    """The usual product of 1 - k / (n - right + i) is the reference, for numbers whose factorials exceed floats."""
    expected = 1.0
    for i in range(10_000 - 5 + 1, 10_000 + 1):
        expected *= 1.0 - 1000 / i
    assert pass_at_k(10_000, 5, 1000) == pytest.approx(1.0 - expected, rel=1e-12)
    assert pass_at_k(10_000, 9_500, 1000) == 1.0
    assert majority_at_k(
        ["right"] * 40 + ["wrong"] * 24, [True] * 40 + [False] * 24, 63
    ) == pytest.approx(1.0)
