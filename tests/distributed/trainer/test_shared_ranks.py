"""Policies, critics and warm starts that compute common beginnings once, on one rank and on two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import prefix_checks
from tests.support.critic_checks import make_reward_model
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    make_reward_model(models, "qwen2")
    run_ranks(prefix_checks.two_ranks, 2, timeout=240, arguments=[str(models), str(models / "two.json")])
    return json.loads((models / "two.json").read_text())


@pytest.mark.parametrize("how", ["whole groups", "split groups"])
def test_groups_on_one_rank_or_on_two_have_the_gradients_of_packs(
    two_ranks: dict[str, str], how: str
) -> None:
    assert two_ranks[how] == ""


def test_adapters_have_the_gradients_of_packs(two_ranks: dict[str, str]) -> None:
    assert two_ranks["adapters"] == ""


def test_critics_and_references_have_the_values_and_gradients_of_packs(
    two_ranks: dict[str, str],
) -> None:
    assert two_ranks["others"] == ""


def test_a_supervised_step_has_the_gradients_of_packs_and_counts_all_tokens(
    two_ranks: dict[str, str],
) -> None:
    assert two_ranks["sft"] == ""


@pytest.mark.parametrize("how", ["mixture", "one pack of a mixture on two ranks"])
def test_a_shared_token_counts_for_all_of_its_samples_in_a_mixture(
    two_ranks: dict[str, str], how: str
) -> None:
    assert two_ranks[how] == ""


@pytest.mark.parametrize("how", ["one pack on two ranks", "one pack with windows on two ranks"])
def test_two_ranks_share_a_prompt_that_spans_both(two_ranks: dict[str, str], how: str) -> None:
    assert two_ranks[how] == ""


def test_a_rank_may_have_a_part_of_the_prompt_and_no_target(two_ranks: dict[str, str]) -> None:
    assert two_ranks["a part without targets"] == ""


def test_siblings_with_other_routes_share_the_tokens_before(one_rank: None, models: Path) -> None:
    prefix_checks.check_differing_routes(models)


@pytest.mark.parametrize(
    "settings",
    [{"activation_checkpointing": "full"}, {"freeze": ["model.layers.0"]}, {"compile": True}],
    ids=lambda settings: next(iter(settings)),
)
def test_memory_settings_frozen_layers_and_compiling_change_nothing(
    one_rank: None, models: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda layer, dynamic: compiled(layer, backend="aot_eager", dynamic=dynamic),
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        prefix_checks.check_policy(models, "qwen2", **settings)
