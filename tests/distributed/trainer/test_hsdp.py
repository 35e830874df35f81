"""The model cut over two ranks of four, a copy on the other two: against one process, and handed to and fro."""

import json
from pathlib import Path

import pytest

from tests.support import critic_checks, hsdp_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks
from trainer.run import checkpoint


@pytest.fixture(scope="module")
def found(one_rank: None, models: Path) -> dict[str, str]:
    """What went wrong on four ranks, who were left a step of this process."""
    critic_checks.make_reward_model(models, "qwen2")
    alone = hsdp_checks.make_policy(models, shard_size=None)
    hsdp_checks.check_next_steps(alone, models, 1, 1)
    checkpoint.save(models / "handed", 1, {"policy": alone}, {})
    run_ranks(hsdp_checks.four_ranks, 4, timeout=280, arguments=[str(models), str(models / "found.json")])
    return json.loads((models / "found.json").read_text())


def test_three_steps_like_one_process(found: dict[str, str]) -> None:
    assert found["steps"] == ""


def test_all_models_share_the_groups_of_one_mesh(found: dict[str, str]) -> None:
    assert found["groups"] == ""


def test_a_checkpoint_goes_to_two_by_two_ranks_and_back(found: dict[str, str], models: Path) -> None:
    assert found["handed over"] == ""
    policy = hsdp_checks.make_policy(models, shard_size=None)
    checkpoint.load(models / "handed" / "step_2", {"policy": policy})
    hsdp_checks.check_next_steps(policy, models, 3, 3)


def test_half_a_model_on_a_rank_is_sent_and_exported_whole(found: dict[str, str]) -> None:
    assert found["shards"] == ""


@pytest.mark.parametrize(("kind", "tied"), checks.KINDS)
def test_four_ranks_send_the_checkpoint(found: dict[str, str], kind: str, tied: bool) -> None:
    """A quarter of the model on each."""
    assert found[f"sent {checks.model_folder(Path(), kind, tied).name}"] == ""


@pytest.mark.parametrize("what", ["critic", "shared trunk", "critic's state"])
def test_a_critic_on_two_by_two_ranks(found: dict[str, str], what: str) -> None:
    assert found[what] == ""


@pytest.mark.parametrize("what", ["traffic", "traffic of replicas"])
def test_the_plan_counts_the_collectives_of_four_ranks(found: dict[str, str], what: str) -> None:
    assert found[what] == ""
