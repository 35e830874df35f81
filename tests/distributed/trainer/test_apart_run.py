"""Whole runs whose engines are on ranks of their own: one rank trains, one generates."""

import json
import re
from pathlib import Path
from typing import Any

from arithmetic import correct
from safetensors.torch import load_file

from tests.conftest import TinyModel
from tests.distributed.killed_run import unequal
from tests.distributed.real_run import Run, differences, write_recipe

APART = ["--engine.apart", "1"]


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
    run = Run(recipe, *arguments, ranks=ranks, name=name, preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    return run


def test_without_a_lag_engines_apart_are_bit_for_bit_those_of_the_same_rank(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, tiny_model())
    together = finished(recipe, ranks=1, name="together")
    apart = finished(recipe, *APART, ranks=2, name="apart")
    assert len(apart.rows()) == 4 and not unequal(together, apart)


def test_with_a_lag_a_run_that_goes_on_from_a_checkpoint_ends_as_the_undisturbed_one(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, tiny_model())
    lag = [*APART, "--rollout.lag", "1", "--eval.every", "0", "--checkpoint.every", "2"]
    one = finished(recipe, *lag, ranks=2, name="one")
    assert one.rows()[0]["gap/max"] <= 1e-4 and all(row["stale/log_ratio_1"] > 1e-3 for row in one.rows()[1:])
    shown = [json.loads(line) for line in (one.folder / "completions.jsonl").read_text().splitlines()]
    assert shown and all(row["answer"] == correct(*map(int, re.findall(r"\d+", row["prompt"])[:2])) for row in shown)
    resume = ["--checkpoint.resume", str(one.folder / "checkpoints" / "step_2")]
    again = finished(recipe, *lag, *resume, ranks=2, name="again")
    assert not differences(one.comparable_rows()[2:], again.comparable_rows())
    weights, others = (load_file(run.folder / "model" / "model.safetensors") for run in (one, again))
    assert weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)
