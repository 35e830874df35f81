"""What k answers to a prompt would be worth, estimated from n ≥ k of them without bias and without drawing.

Both are expectations over all subsets of k of the n answers, computed in whole numbers, and so exact for any n.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n answers, `right` of which are right, hold a right one.

    1 - C(n - right, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), equation 1, for 1 ≤ k ≤ n.
    """
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)


def majority_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer among k of the n is right (self-consistency, arXiv:2203.11171).

    Args:
        votes: [n] what each answer comes down to; None abstains, and where all abstain nothing is right.
        right: [n] whether it is right. Where votes for the same answer were judged differently, their mean counts.
        k: from 1 to n. Of answers that tie, each wins equally often.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    won = _wins(tuple(sorted(counts.values())), len(votes) - counts.total(), k)
    verdicts = Counter(vote for vote, verdict in zip(votes, right, strict=True) if verdict and vote is not None)
    return float(sum(won[count] * Fraction(verdicts[vote], count) for vote, count in counts.items()))


@lru_cache(maxsize=4096)
def _wins(counts: tuple[int, ...], abstaining: int, k: int) -> dict[int, Fraction]:
    """For every number of votes that an answer has among all n: the chance that such an answer wins among k of them."""
    everything = comb(sum(counts) + abstaining, k)
    won = {}
    for count in set(counts):
        others = list(counts)
        others.remove(count)
        ways = Fraction(0)
        for own in range(1, min(count, k) + 1):
            for ties, rest in _ways(others, abstaining, own, k - own).items():
                ways += Fraction(comb(count, own) * rest, ties + 1)
        won[count] = ways / everything
    return won


def _ways(counts: Sequence[int], abstaining: int, most: int, cast: int) -> Counter[int]:
    """In how many ways `cast` ballots fall to these answers, none of which gets more than `most`, and to abstainers.

    Returns:
        the ways, by how many answers get exactly `most`.
    """
    left = sum(min(count, most) for count in counts)  # ballots that the answers still to come can take
    ways = Counter({(0, k): comb(abstaining, k) for k in range(max(0, cast - left), min(abstaining, cast) + 1)})
    for count in counts:
        left -= min(count, most)
        grown: Counter[tuple[int, int]] = Counter()
        for (ties, so_far), number in ways.items():
            for own in range(max(0, cast - left - so_far), min(count, most, cast - so_far) + 1):
                grown[ties + (own == most), so_far + own] += number * comb(count, own)
        ways = grown
    return Counter({ties: number for (ties, _), number in ways.items()})
