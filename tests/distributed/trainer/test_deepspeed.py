"""Compare DeepSpeedPolicy, ZeRO-1 to 3, with plain steps and FsdpPolicy on two real ranks, launched once."""

from pathlib import Path

import pytest

from tests.support import deepspeed_checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    return failures_of(deepspeed_checks.two_ranks, 2, models)


@pytest.mark.parametrize("what", deepspeed_checks.two_ranks(Path()))
def test_zero_on_two_ranks_computes_as_one_process_and_as_fsdp(two_ranks: Failures, what: str) -> None:
    """test_hsdp.py has four ranks."""
    assert two_ranks[what] == ""


def test_steps_print_no_deprecation_warnings(two_ranks: Failures) -> None:
    assert "is deprecated" not in two_ranks.printed
