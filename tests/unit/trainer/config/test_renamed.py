"""Renamed and removed keys are refused in one sentence that says what to do."""

from pathlib import Path

import pytest

from trainer.config.recipe import REFUSED, RENAMED, known_keys, load_config
from trainer.errors import UserError

TRACE = "algorithm.trace is now algorithm.gae_lambda: write algorithm.gae_lambda: 0.9"
TRUNCATED = "when sampling is truncated the engine's probabilities are not the policy's: leave it out"
IN_ORDER = "engines begin prompts in the order of the data: leave it out"
APART = "engine.apart is now engine.placement: write engine.placement:"


def test_former_names_are_not_keys_and_present_ones_are() -> None:
    keys = {name for name, _ in known_keys()}
    for old, (new, _) in RENAMED.items():
        assert old not in keys and new in keys
    assert keys.isdisjoint(REFUSED)


@pytest.mark.parametrize(
    ("section", "overrides", "sentences"),
    [
        ("", ["algorithm.trace=0.9"], [TRACE]),
        ("algorithm: {trace: 0.9}", [], [TRACE]),
        (
            "data: {eval_path: e.jsonl, eval_size: 9}",
            [],
            [
                'data.eval_path is now eval.datasets.NAME.path: write eval.datasets.NAME.path: "e.jsonl"',
                "data.eval_size is now eval.datasets.NAME.size: write eval.datasets.NAME.size: 9",
            ],
        ),
        ("sampling: {top_p: 0.9}", [], [f"sampling.top_p is 0.9, but {TRUNCATED}"]),
        ("sampling: {top_k: -1}", [], [f"sampling.top_k is -1, but {TRUNCATED}"]),
        ("sampling: {min_p: 0.05}", [], [f"sampling.min_p is 0.05, but {TRUNCATED}"]),
        ("rollout: {order: data}", [], [f"rollout.order is 'data', but {IN_ORDER}"]),
        ("rollout: {order: longest_first}", [], [f"rollout.order is 'longest_first', but {IN_ORDER}"]),
        (
            "checkpoint: {every: auto}",
            [],
            [
                "checkpoint.every is 'auto', but should be a number of steps, such as that of half an hour: "
                "auto is gone"
            ],
        ),
        ("", ["engine.apart=0"], [f"{APART} shared"]),
        ("", ["engine.apart=3"], [f"{APART} ranks, and engine.ranks: 3"]),
        ("", ["engine.apart=ray"], [f'{APART} "ray"']),
    ],
)
def test_a_key_that_is_gone_is_refused_with_what_to_write_instead(
    tmp_path: Path, section: str, overrides: list[str], sentences: list[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{path: m}}\n{section}\n")
    with pytest.raises(UserError) as caught:
        load_config(recipe, ["data.path=d", *overrides])
    assert str(caught.value).splitlines() == sentences


def test_an_evaluation_may_truncate_its_sampling(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {path: d}\neval: {top_p: 0.9}\n")
    assert load_config(recipe, []).eval.top_p == 0.9
