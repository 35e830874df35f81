"""Every preset trains with real engines and a real policy on two ranks, which are started once for all presets."""

import json
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.support import preset_checks as checks
from tests.support.launch import run_ranks
from tests.support.real_run import write_recipe
from trainer.config.algorithm import PRESETS


@pytest.fixture(scope="module")
def trained(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train all presets; their reports by name."""
    folder = tmp_path_factory.mktemp("presets")
    recipe = write_recipe(folder, tiny_model(), critic={"lr": 1e-3}, run={"steps": 100})
    run_ranks(checks.train_presets, 2, timeout=420, arguments=[str(recipe), str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("preset", checks.SHARED)
def test_ranks_that_share_sequences_are_as_close_to_their_engines(
    trained: dict[str, Any], preset: str
) -> None:
    gaps = {name: max(row["gap/max"] for row in report["rows"]) for name, report in trained.items()}
    assert gaps[preset] <= 1e-4 and all(row["gap/mean"] > 0 for row in trained[preset]["rows"]), gaps


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_on_two_ranks(trained: dict[str, Any], preset: str) -> None:
    """Metrics are finite and equal on both ranks, weights move, and trainer and engine have the same probabilities."""
    report = trained[preset]
    rows = report["rows"]
    assert len(rows) == checks.STEPS and checks.finite(rows) and report["ranks agree"]
    assert all(row["no_signal_steps"] == row["skipped_steps"] == 0 for row in rows)
    assert report["moved"] > 1e-5 and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["gap/max"] for row in rows) <= 1e-4
    assert (report["critic moved"] > 1e-5) == (preset == "ppo")
    assert ("kl" in rows[-1]) == (
        preset in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "distill")
    )
    assert ("sampling/rounds" in rows[-1]) == (preset == "dapo")
