"""Whole runs whose engines are on ranks of their own: one rank trains, one generates."""

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from scripts.examples.tasks.arithmetic import correct
from tests.conftest import TinyModel
from tests.support.killed_run import unequal
from tests.support.real_run import ROOT, Run, differences, write_recipe
from tests.support.rows import read_rows

APART = ["--engine.placement", "ranks"]
CUT: dict[str, dict[str, Any]] = {
    "sampling": {"max_tokens": 12},
    "rollout": {"slice_tokens": 5, "ahead": 2.0},
    "lora": {"rank": 4},
}
"""Adapters, and answers that continue from step to step."""
TURNS = {
    "custom": f"{ROOT}/scripts/examples/second_look.py:second_look",
    "kwargs": {"looks": 1, "bonus": 0.5},
}


def small_recipe(folder: Path, model: Path, **overrides: dict[str, Any]) -> Path:
    return write_recipe(
        folder,
        model,
        run={"steps": 3},
        eval={"every": 2},
        policy={"lr": 3e-3},
        tracking={"completions_per_step": 100},
        **overrides,
    )


def finished(recipe: Path, *arguments: str, ranks: int, name: str) -> Run:
    """Run to the end, which must be successful, and return the run."""
    run = Run(recipe, *arguments, ranks=ranks, name=name, preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    return run


def together_and_apart(recipe: Path, *arguments: str) -> tuple[Run, Run]:
    """Run the recipe on one rank, and on two with the engine apart."""
    together = finished(recipe, *arguments, ranks=1, name="together")
    return together, finished(recipe, *arguments, *APART, ranks=2, name="apart")


def test_engines_apart_without_lag_train_alike_bit_for_bit(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    together, apart = together_and_apart(small_recipe(tmp_path, tiny_model()))
    assert len(apart.rows()) == 4 and not unequal(together, apart)


def test_engines_apart_train_alike_with_deepspeed_adapters_slices_and_turns(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    sections = CUT | {"rollout": CUT["rollout"] | TURNS, "engine": {"max_model_len": 128}}
    sections |= {"algorithm": {"sampling_rounds": 3, "oversampling": 1.5}}
    zero = ["--policy.backend", "deepspeed", "--policy.zero_stage", "3"]
    together, apart = together_and_apart(small_recipe(tmp_path, tiny_model(), **sections), *zero)
    assert not unequal(together, apart)
    rows = apart.rows()
    assert any(row["carry/answers"] for row in rows[1:]) and any(row["stale/share"] for row in rows[1:])


@pytest.mark.parametrize("sections", [{}, CUT], ids=["", "adapters, answers in slices"])
def test_a_resumed_run_with_a_lag_ends_as_the_undisturbed_one(
    sections: dict[str, dict[str, Any]], tiny_model: TinyModel, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, tiny_model(), **sections)
    lag = [
        *APART,
        "--rollout.lag",
        "1",
        "--eval.every",
        "0",
        "--checkpoint.every",
        "2",
        "--run.steps",
        "4",
    ]
    one = finished(recipe, *lag, ranks=2, name="one")
    rows = one.rows()
    assert rows[0]["gap/max"] <= 1e-4 and all(row["stale/log_ratio"] > 1e-3 for row in rows[1:])
    if sections:
        assert [row["stale/share"] for row in rows] == [0, 1, 1, 1] and rows[0]["stale/age_max"] == 0
        assert all(row["stale/age_mean"] >= 1 for row in rows[1:])
        assert any(row["carry/answers"] for row in rows)
    completions = read_rows(one.folder / "completions.jsonl")
    assert completions
    assert all(
        row["answer"] == correct(*map(int, re.findall(r"\d+", row["prompt"])[:2])) for row in completions
    )
    resume = ["--checkpoint.resume", str(one.folder / "checkpoints" / "step_2")]
    again = finished(recipe, *lag, *resume, ranks=2, name="again")
    assert not differences(one.comparable_rows()[2:], again.comparable_rows())
    first, second = (load_file(run.folder / "model" / "model.safetensors") for run in (one, again))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
