"""Checks of settings with answers that are cut into slices, and the greatest age of such answers."""

from typing import Any

import pytest

from tests.support.recipes import make_config
from trainer.commands.plan import batch_lines
from trainer.config.answer_age import oldest_age
from trainer.config.checks import find_problems
from trainer.config.schema import TrainConfig

CUT = {"slice_tokens": 100, "ahead": 1}


def recipe(**sections: Any) -> TrainConfig:
    """Return a recipe with answers of at most 400 tokens."""
    base: dict[str, Any] = {
        "sampling": {"max_tokens": 400},
        "reward": {"functions": [{"name": "exact_match"}]},
    }
    return make_config(base, **sections)


def rollout_problems(config: TrainConfig) -> list[str]:
    return [problem for problem in find_problems(config, "train", {}) if "rollout." in problem]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"rollout": CUT | {"slice_tokens": 400}},
            "rollout.slice_tokens = 400 cuts no answer, since none has more",
        ),
        (
            {"rollout": {"ahead": 1}},
            "rollout.ahead is 1.0, but answers are not cut: set rollout.slice_tokens",
        ),
        ({"rollout": {"max_age": 3}}, "rollout.max_age is 3, but answers are not cut"),
        ({"rollout": {"old_tokens": "mask"}}, "rollout.old_tokens is mask, but answers are not cut"),
        (
            {"rollout": CUT | {"max_age": 3}},
            "let answers become 4 steps old, more than rollout.max_age = 3",
        ),
        ({"rollout": CUT, "algorithm": {"tis_cap": None}}, "but algorithm.tis_cap is null: set it, or"),
        (
            {"rollout": CUT | {"old_tokens": "mask"}, "algorithm": {"credit": "turns"}},
            "rollout.old_tokens is mask, which hides whole turns",
        ),
        (
            {"rollout": CUT, "sampling": {"stop": ["###"]}},
            "sampling.stop is set, but a stop string may lie across",
        ),
        (
            {"rollout": CUT | {"tools": ["a:b"], "tool_parser": "inline"}},
            "rollout.tool_parser is inline, whose end tag may lie across a cut",
        ),
        (
            {"rollout": CUT, "engine": {"logits_processors": ["a:B"]}},
            "engine.logits_processors would take an answer that continues",
        ),
        ({"rollout": CUT | {"sampler": "a:B"}}, "rollout.sampler takes its whole batch at once"),
    ],
)
def test_settings_that_conflict_with_slices_are_refused_in_one_sentence(
    sections: dict[str, Any], sentence: str
) -> None:
    [problem] = rollout_problems(recipe(**sections))
    assert sentence in problem and len(problem) < 300


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": CUT},
        {"rollout": CUT | {"max_age": 4}},
        {"rollout": {"slice_tokens": 400}},  # cuts none, and makes none older
        {"rollout": CUT, "algorithm": {"tis_cap": None, "keep_band": [0.5, 2]}},
        {"rollout": CUT | {"old_tokens": "mask"}, "algorithm": {"tis_cap": None}},
        {"rollout": CUT | {"tools": ["a:b"]}},
    ],
)
def test_keys_that_do_not_conflict_with_slices_are_accepted(sections: dict[str, Any]) -> None:
    assert rollout_problems(recipe(**sections)) == []


@pytest.mark.parametrize(
    ("slice_tokens", "ahead", "turns", "age"),
    [(100, 1, 1, 4), (399, 1, 1, 2), (399, 0, 1, 1), (134, 1.5, 1, 4), (100, 2, 3, 13), (400, 0, 1, 0)],
)
def test_the_plan_says_how_old_answers_may_become(
    slice_tokens: int, ahead: float, turns: int, age: int
) -> None:
    several = {"tools": ["a:b"], "max_turns": turns} if turns > 1 else {}
    config = recipe(
        rollout={"slice_tokens": slice_tokens, "ahead": ahead} | several,
        batch={"prompts_per_step": 10},
        algorithm={"group_size": 4},
        engine={"max_model_len": 2000},
    )
    assert oldest_age(config) == age
    lines = dict(batch_lines(config, 1))
    flying = 40 + int(ahead * 40)
    assert (
        lines["answers in flight"]
        == f"{flying} with rollout.ahead; each begins at most {age} step(s) before it is trained on"
    )
    assert lines["answers an engine"].startswith(f"{flying}, ")
    assert "answers in flight" not in dict(batch_lines(recipe(), 1))
