"""A mixture whose experts are split over two and four ranks (policy.expert_parallel), compared with one process."""

from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.support import critic_checks, expert_checks
from tests.support.rank_checks import Failures, failures_of
from tests.support.real_run import Run, write_recipe
from trainer.run import checkpoint


@pytest.fixture(scope="module")
def mixtures(models: Path) -> Path:
    """Return the folder of the mixtures."""
    folder = models / "mixtures"
    expert_checks.make_mixtures(folder)
    critic_checks.make_reward_model(folder / "even", expert_checks.MIXTURE[0])
    return folder


@pytest.fixture(scope="module")
def two_ranks(mixtures: Path) -> Failures:
    return failures_of(expert_checks.two_ranks, 2, mixtures)


@pytest.fixture(scope="module")
def four_ranks(mixtures: Path, two_ranks: Failures) -> Failures:
    """Four ranks go on from the first step of two."""
    return failures_of(expert_checks.four_ranks, 4, mixtures)


@pytest.mark.parametrize("what", expert_checks.two_ranks(Path()))
def test_two_ranks_with_half_of_the_experts_each_equal_one_process(
    two_ranks: Failures, what: str
) -> None:
    assert two_ranks[what] == ""


@pytest.mark.parametrize("what", expert_checks.four_ranks(Path()))
def test_four_ranks_in_two_groups_equal_one_process(four_ranks: Failures, what: str) -> None:
    assert four_ranks[what] == ""


def test_a_checkpoint_goes_from_two_ranks_to_four_and_to_one(
    one_rank: None, mixtures: Path, four_ranks: Failures
) -> None:
    """The four ranks have experts in groups of four, and the one has all of them."""
    for step in (1, 2):
        policy = expert_checks.make_policy(mixtures / "even", 1)
        checkpoint.load(mixtures / "even" / f"step_{step}", {"policy": policy})
        expert_checks.check_next_steps(policy, mixtures / "even", step + 1, step + 1)


def test_a_run_sends_split_experts_to_its_engines(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The second sync replays; everything that engines hold is compared with the ranks' shards."""
    recipe = write_recipe(
        tmp_path,
        tiny_model(architecture="qwen3_moe", tied=False),
        run={"steps": 2},
        policy={"expert_parallel": 2},
        engine={"plain_cpu_weights": True},
    )
    run = Run(recipe, preloaded=True)
    assert run.wait() == 0, run.output()
    assert [row["sync/verified"] for row in run.rows()] == [1.0, 2.0]
    assert max(row["gap/mean"] for row in run.rows()) < 1e-4
