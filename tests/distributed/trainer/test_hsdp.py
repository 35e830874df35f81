"""The model is sharded over two of four ranks, with a replica on the other two, and compared with one process."""

from pathlib import Path

import pytest

from tests.support import critic_checks, hsdp_checks
from tests.support.rank_checks import Failures, failures_of
from trainer.run import checkpoint


@pytest.fixture(scope="module")
def four_ranks(one_rank: None, models: Path) -> Failures:
    """Four ranks continue from this process's first step."""
    critic_checks.make_reward_model(models, "qwen2")
    alone = hsdp_checks.make_policy(models, shard_size=None)
    hsdp_checks.check_next_steps(alone, models, 1, 1)
    checkpoint.save(models / "handed", 1, {"policy": alone}, {})
    return failures_of(hsdp_checks.four_ranks, 4, models)


@pytest.mark.parametrize("what", hsdp_checks.four_ranks(Path()))
def test_a_model_on_two_by_two_ranks_computes_as_in_one_process(four_ranks: Failures, what: str) -> None:
    """Each rank has a half of the model, or a quarter."""
    assert four_ranks[what] == ""


def test_a_checkpoint_goes_to_two_by_two_ranks_and_back(four_ranks: Failures, models: Path) -> None:
    policy = hsdp_checks.make_policy(models, shard_size=None)
    checkpoint.load(models / "handed" / "step_2", {"policy": policy})
    hsdp_checks.check_next_steps(policy, models, 3, 3)
