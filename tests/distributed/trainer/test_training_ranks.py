"""`hotbunk.Training` on two ranks: as on one, and with sentences where ranks differ."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import training_checks as checks
from tests.support.launch import run_ranks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def folder(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and what one rank has made of it."""
    folder = tmp_path_factory.mktemp("training")
    shutil.copytree(tiny_qwen3, folder / "model")
    torch.save(checks.three_steps(folder / "model"), folder / "one_rank.pt")
    with checks.make(folder / "model") as training:
        training.forward_backward(checks.random_data(4))
        training.optim_step(1e-3)
        training.save(folder / "saved")
        torch.save(checks.weights_of(training), folder / "saved.pt")
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Failures:
    return failures_of(checks.checks_of, 2, folder)


@pytest.mark.parametrize("what", checks.checks_of(Path()))
def test_two_ranks_train_as_one_and_are_told_where_they_differ(two_ranks: Failures, what: str) -> None:
    assert two_ranks[what] == ""


def test_one_rank_loads_what_two_have_saved(folder: Path, two_ranks: Failures) -> None:
    with checks.make(folder / "model") as training:
        training.load(folder / "by_two")
        checks.assert_equal(checks.weights_of(training), torch.load(folder / "saved.pt"))


def test_a_rank_that_makes_no_call_ends_the_others_wait(folder: Path) -> None:
    run_ranks(checks.wait_in_vain, 2, 120, [str(folder / "model")])
