"""The table that scripts/try_ecosystem.sh makes of the requests that it has recorded."""

import json
from pathlib import Path

import pytest
from ecosystem import trial
from transformers import AutoTokenizer

from tests.conftest import TinyModel
from trainer.config.checks import find_problems
from trainer.config.recipe import load_config

FIRST = ([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("requests", "begun"),
    [
        ([FIRST, ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5, 6, 7], [8])], 1),
        # Two samples of a prompt
        ([FIRST, ([1, 2], [3, 5]), ([1, 2, 3, 5, 9], [6]), ([1, 2, 3, 4, 9], [6])], 2),
        ([FIRST, ([1, 2, 3, 9, 5], [6])], 2),  # the last id of the answer has changed
        ([FIRST, ([1, 2, 3], [6])], 2),  # the answer was cut
        ([FIRST, ([7, 1, 2, 3, 4], [6])], 2),
    ],
)
def test_a_request_goes_on_only_with_all_ids_of_one_before(requests: list, begun: int) -> None:
    assert trial.beginnings(requests) == begun


def test_tokens_sampled_beyond_a_stop_string_may_be_missing() -> None:
    end = trial.END_OF_TURN
    requests = [([1, 7], [3, 4, 5]), ([1, 7, 3, end, 9], [6])]
    assert [trial.beginnings(requests, beyond) for beyond in (0, 1, 2, 9)] == [2, 2, 1, 1]
    # Nothing of the answer is there
    assert trial.beginnings([([1, 7], [3, 4]), ([1, 7, end, 9], [6])], 9) == 2
    # Another answer in its place may happen to begin alike.
    assert trial.beginnings([([1, 7], [3, 4, 5]), ([1, 7, 3, 8, end, 9], [6])], 9) == 2


def test_the_tiny_models_end_a_turn_with_the_id_that_is_looked_for(tiny_model: TinyModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == trial.END_OF_TURN


@pytest.mark.parametrize("name", trial.TRIALS)
def test_the_recipe_of_each_trial_is_valid(name: str, tmp_path: Path) -> None:
    """Recipes are valid except for models, environments and data, which are made when a trial runs."""
    (tmp_path / "r.yaml").write_text(json.dumps(trial.recipe(tmp_path, name, trial.TRIALS[name])))
    problems = find_problems(load_config(tmp_path / "r.yaml", []), "train", {})
    assert [
        problem
        for problem in problems
        if not problem.startswith(("model.path", "data.path", "rollout.mcp is set"))
    ] == []
