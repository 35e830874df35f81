"""Muon and an optimizer of the user's own against torch's on a plain copy of the model, on one, two and four ranks."""

import json
from pathlib import Path

import pytest

from tests.support import optimizer_checks as checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    run_ranks(checks.two_ranks, 2, timeout=240, arguments=[str(models), str(models / "optimizers.json")])
    return json.loads((models / "optimizers.json").read_text())


@pytest.mark.parametrize("case", checks.CASES)
def test_one_rank_steps_as_torch_does(one_rank: None, models: Path, case: str) -> None:
    checks.check_steps(models, case)


@pytest.mark.parametrize("case", checks.CASES)
def test_two_ranks_step_as_torch_does(two_ranks: dict[str, str], case: str) -> None:
    assert two_ranks[f"steps {case}"] == ""


def test_muon_on_two_ranks_is_torchs_on_whole_matrices_bit_for_bit(two_ranks: dict[str, str]) -> None:
    assert two_ranks["bits"] == ""


def test_offloaded_state_of_muon_changes_no_update(two_ranks: dict[str, str]) -> None:
    assert two_ranks["offload"] == ""


@pytest.mark.parametrize("case", ["muon", "own"])
def test_two_ranks_continue_from_a_checkpoint_bit_for_bit(two_ranks: dict[str, str], case: str) -> None:
    assert two_ranks[f"saved {case}"] == ""


@pytest.mark.parametrize("case", ["muon", "own"])
def test_one_rank_loads_what_two_have_saved(
    one_rank: None, two_ranks: dict[str, str], models: Path, case: str
) -> None:
    checks.check_loaded(models, case)


def test_four_ranks_load_what_two_have_saved(two_ranks: dict[str, str], models: Path) -> None:
    run_ranks(checks.four_ranks, 4, timeout=240, arguments=[str(models), str(models / "four.json")])
    assert set(json.loads((models / "four.json").read_text()).values()) == {""}
