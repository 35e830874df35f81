"""Ranks that share sequences, each with a part of the tokens, compared with plain Transformers in one process."""

from pathlib import Path

import pytest

from tests.support import critic_checks, sequence_checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    critic_checks.make_reward_model(models, "qwen2")
    return failures_of(sequence_checks.two_ranks, 2, models)


@pytest.fixture(scope="module")
def four_ranks(models: Path) -> Failures:
    return failures_of(sequence_checks.four_ranks, 4, models)


@pytest.mark.parametrize("what", sequence_checks.two_ranks(Path()))
def test_two_ranks_that_share_sequences_compute_as_one(two_ranks: Failures, what: str) -> None:
    """Models have sliding windows, norms of queries, tied heads, experts or latent attention.

    scripts/bench/long_sequences.py measures peak memory at 32k tokens.
    """
    assert two_ranks[what] == ""


@pytest.mark.parametrize("what", sequence_checks.four_ranks(Path()))
def test_pairs_and_groups_of_four_compute_as_one(four_ranks: Failures, what: str) -> None:
    """Four ranks are more than the two heads of keys and values, which are repeated."""
    assert four_ranks[what] == ""
