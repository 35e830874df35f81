"""Presets and the keys set beside them; refused combinations and their error messages."""

import re
from typing import Any

import pytest

from tests.support.recipes import make_config
from trainer.config.algorithm import PRESETS, AlgorithmConfig, check_algorithm


def problems(algorithm: dict[str, Any], **sections: dict[str, Any]) -> list[str]:
    config = make_config(algorithm=algorithm, **sections)
    updates = config.batch.updates_per_step * config.algorithm.num_iterations
    return list(check_algorithm(config.algorithm, updates, config.critic.shared))


def alone(preset: str) -> dict[str, Any]:
    """Return a preset with only the keys that have no default."""
    return {"preset": preset} | ({"teacher": "t"} if preset == "distill" else {})


def test_nothing_is_wrong_with_the_defaults() -> None:
    assert problems({}) == []
    default = AlgorithmConfig()
    assert (default.clip_low, default.clip_high, default.dual_clip, default.sapo_temperatures) == (
        0.2,
        0.28,
        None,
        None,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_its_keys_and_goes_together(preset: str) -> None:
    config = AlgorithmConfig(**alone(preset))
    assert {key: getattr(config, key) for key in PRESETS[preset].keys} == PRESETS[preset].keys
    assert problems(alone(preset)) == []
    assert AlgorithmConfig(**config.model_dump(mode="json")) == config  # as config.yaml keeps it


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loss", ["clip", "cispo", "sapo", "reinforce"])
def test_a_presets_bounds_apply_only_to_its_own_loss(preset: str, loss: str) -> None:
    assert problems({**alone(preset), "loss": loss, "ratio_level": "token"}) == []


def test_keys_of_the_recipe_override_the_preset() -> None:
    config = AlgorithmConfig(preset="dapo", clip_high=0.5, overlong_margin=None)
    assert (config.clip_low, config.clip_high, config.overlong_margin, config.sampling_rounds) == (
        0.2,
        0.5,
        None,
        10,
    )


IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward"}


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator is k1, whose gradient in the loss is 0"),
        ({**IN_REWARD, "kl_estimator": "k3"}, "kl_estimator is k3, but in the reward only k1"),
        (
            {**IN_REWARD, "kl_estimator": "k1", "credit": "turns"},
            "kl_in is reward, but turns are compared",
        ),
        (
            {**IN_REWARD, "kl_estimator": "k1", "advantage": "max_rl"},
            "kl_in is reward, which makes some rewards negative",
        ),
        ({"loss": "reinforce", "num_iterations": 2}, r"loss is reinforce, but .* = 2: .* make it 1"),
        (
            {"loss": "reinforce", "ratio_level": "geometric"},
            "ratio_level is geometric, but the loss reinforce has no",
        ),
        ({"dual_clip": 1.28}, "dual_clip is 1.28, but must be above 1 \\+ clip_high = 1.28"),
        (
            {"loss": "cispo", "dual_clip": 6.0},
            "dual_clip is set, but algorithm.loss is cispo: it belongs to clip, so",
        ),
        (
            {"loss": "sapo", "clip_low": 0.2},
            "clip_low is set, but algorithm.loss is sapo: it belongs to clip or cispo",
        ),
        ({"loss": "reinforce", "clip_high": 0.2}, "clip_high is set, but algorithm.loss is reinforce"),
        (
            {"sapo_temperatures": [1, 2]},
            "sapo_temperatures is set, but algorithm.loss is clip: it belongs to sapo",
        ),
        ({"clip_low": None}, "clip_low is null, but the loss clip needs it"),
        (
            {"group_size": 1},
            r"group_size is 1, but answers are compared within their group \(advantage: group\)",
        ),
        (
            {"group_size": 1, "advantage": "gae", "sampling_rounds": 2},
            "group_size is 1, so rewards differ in no group",
        ),
        (
            {"credit": "turns", "advantage": "leave_one_out"},
            "credit is turns, .* not with leave_one_out",
        ),
        ({"credit": "turns", "advantage": "max_rl"}, "credit is turns, .* not with max_rl"),
        (
            {"advantage": "max_rl", "overlong_margin": 0.2},
            "overlong_margin makes rewards negative, and max_rl",
        ),
        (
            {"combine_rewards": "normalize_then_sum", "advantage": "gae"},
            "combine_rewards .* not with gae",
        ),
        ({"combine_rewards": "normalize_then_sum", "credit": "turns"}, "credit and combine_rewards"),
        (
            {"combine_rewards": "normalize_then_sum", "length_strength": 0.3},
            "length_strength and combine_rewards",
        ),
        ({"keep_band": [1.1, 2.0]}, r"keep_band is \[1.1, 2.0\], but must include 1"),
        ({"advantage": "distill"}, "teacher is missing"),
        ({"teacher": "t"}, "teacher is set, but algorithm.advantage is group: only distill"),
        ({"preset": "distill", "teacher": "t", "kl_coef": 0.1}, "kl_coef is set, but the teacher takes"),
        (
            {"preset": "distill", "teacher": "t", "drop_zero_variance": True},
            "advantage is distill, which uses no rewards",
        ),
        ({"at_bound": "fill"}, "at_bound is fill, but all groups are kept"),
    ],
)
def test_conflicting_keys_are_named(algorithm: dict[str, Any], sentence: str) -> None:
    (problem,) = problems(algorithm)
    assert re.match(f"algorithm.{sentence}", problem), problem


def test_the_plain_policy_gradient_has_one_update() -> None:
    (problem,) = problems({"preset": "rloo"}, batch={"updates_per_step": 4})
    assert "batch.updates_per_step * algorithm.num_iterations = 4" in problem


def test_a_shared_critic_is_accepted_with_gae_only() -> None:
    (problem,) = problems({}, critic={"shared": True})
    assert problem.startswith("critic.shared is set, but algorithm.advantage is group")
    assert problems({"preset": "ppo"}, critic={"shared": True}) == []


@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_a_group_of_one_answer_is_accepted_where_answers_are_not_compared(advantage: str) -> None:
    assert problems({"group_size": 1, "advantage": advantage}) == []
