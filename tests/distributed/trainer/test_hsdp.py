"""The model is sharded over two of four ranks, with a replica on the other two, and compared with one process."""

import json
from pathlib import Path

import pytest

from tests.support import critic_checks, hsdp_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks
from trainer.run import checkpoint


@pytest.fixture(scope="module")
def failures(one_rank: None, models: Path) -> dict[str, str]:
    """Return the errors of each check on four ranks, which continue from this process's first step."""
    critic_checks.make_reward_model(models, "qwen2")
    alone = hsdp_checks.make_policy(models, shard_size=None)
    hsdp_checks.check_next_steps(alone, models, 1, 1)
    checkpoint.save(models / "handed", 1, {"policy": alone}, {})
    run_ranks(
        hsdp_checks.four_ranks, 4, timeout=280, arguments=[str(models), str(models / "found.json")]
    )
    return json.loads((models / "found.json").read_text())


def test_three_steps_are_those_of_one_process(failures: dict[str, str]) -> None:
    assert failures["steps"] == ""


def test_all_models_share_the_process_groups_of_one_mesh(failures: dict[str, str]) -> None:
    assert failures["groups"] == ""


def test_a_checkpoint_goes_to_two_by_two_ranks_and_back(failures: dict[str, str], models: Path) -> None:
    assert failures["handed over"] == ""
    policy = hsdp_checks.make_policy(models, shard_size=None)
    checkpoint.load(models / "handed" / "step_2", {"policy": policy})
    hsdp_checks.check_next_steps(policy, models, 3, 3)


def test_ranks_with_half_a_model_send_and_export_all_of_it(failures: dict[str, str]) -> None:
    assert failures["shards"] == ""


@pytest.mark.parametrize(("kind", "tied"), checks.KINDS)
def test_four_ranks_send_the_checkpoint(failures: dict[str, str], kind: str, tied: bool) -> None:
    """Each rank has a quarter of the model."""
    assert failures[f"sent {checks.model_folder(Path(), kind, tied).name}"] == ""


@pytest.mark.parametrize("what", ["critic", "shared trunk", "critic's state"])
def test_a_critic_on_two_by_two_ranks_learns_as_a_plain_one(failures: dict[str, str], what: str) -> None:
    assert failures[what] == ""


@pytest.mark.parametrize("what", ["traffic", "traffic of replicas"])
def test_the_plan_counts_the_collectives_of_four_ranks(failures: dict[str, str], what: str) -> None:
    assert failures[what] == ""
