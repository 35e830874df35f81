"""Policies, critics and warm starts that compute common beginnings once, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import policy_checks as checks
from tests.support import prefix_checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    prefix_checks.make_models(models)
    return failures_of(prefix_checks.two_ranks, 2, models)


@pytest.mark.parametrize("what", prefix_checks.two_ranks(Path()))
def test_groups_on_one_rank_or_on_two_have_the_gradients_of_packs(
    two_ranks: Failures, what: str
) -> None:
    assert two_ranks[what] == ""


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
    checks.compile_without_code(monkeypatch)
    with torch._dynamo.config.patch(disable=False):
        prefix_checks.check_policy(models, "qwen2", **settings)
