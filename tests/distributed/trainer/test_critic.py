"""Compare a critic, and a value head on the policy's trunk, with a plain trunk and a linear head on one rank.

test_hsdp.py does so on four ranks.
"""

import json
from pathlib import Path

import pytest

from tests.support import critic_checks
from tests.support import policy_checks as checks
from tests.support.recipes import make_config
from trainer.errors import UserError
from trainer.policy.critic import make_critic


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_reward_model_is_trained_further_as_a_critic(one_rank: None, models: Path, kind: str) -> None:
    critic_checks.make_reward_model(models, kind)
    critic_checks.check_values_and_gradients(models, kind)


def test_a_value_head_on_the_policys_trunk_learns_as_a_plain_one(one_rank: None, models: Path) -> None:
    critic_checks.check_head_on_shared_trunk(models)


def test_a_restored_critic_resumes_bit_for_bit(one_rank: None, models: Path) -> None:
    critic_checks.check_state(models)


def test_a_recipes_critic_has_a_learning_rate_of_its_own(one_rank: None, models: Path) -> None:
    model = {"path": str(checks.model_folder(models))}
    policy = {"lr": 1e-6, "warmup_steps": 0, "dtype": "float32"}
    config = make_config(model=model, policy=policy, critic={"lr": 1e-3, "warmup_steps": 1})
    critic = make_critic(config, checks.CPU, 10)
    batches = checks.own_batches(checks.make_samples(), 60)
    rates = [
        critic.update(batches, critic_checks.squared_error(batches)).learning_rate for _ in range(2)
    ]
    assert rates == [0.5e-3, 1e-3]


def test_a_model_that_cannot_be_a_critic_is_refused(one_rank: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match="cannot be a critic"):
        critic_checks.make_critic(tmp_path)
