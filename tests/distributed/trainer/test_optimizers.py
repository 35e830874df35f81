"""Muon and an optimizer of the user's own against torch's on a plain copy of the model, on one, two and four ranks."""

from pathlib import Path

import pytest

from tests.support import optimizer_checks as checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    return failures_of(checks.two_ranks, 2, models)


@pytest.mark.parametrize("case", checks.CASES)
def test_one_rank_steps_as_torch_does(one_rank: None, models: Path, case: str) -> None:
    checks.check_steps(models, case)


@pytest.mark.parametrize("what", checks.two_ranks(Path()))
def test_two_ranks_step_as_torch_does_and_continue_bit_for_bit(two_ranks: Failures, what: str) -> None:
    assert two_ranks[what] == ""


@pytest.mark.parametrize("case", ["muon", "own"])
def test_one_rank_loads_what_two_have_saved(
    one_rank: None, two_ranks: Failures, models: Path, case: str
) -> None:
    checks.check_loaded(models, case)


def test_four_ranks_load_what_two_have_saved(two_ranks: Failures, models: Path) -> None:
    assert set(failures_of(checks.four_ranks, 4, models).values()) == {""}
