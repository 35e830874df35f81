"""A whole run whose answers go on from step to step: real ranks, real engines, and a checkpoint in the middle."""

import json
from pathlib import Path
from typing import Any

from tests.conftest import TinyModel
from tests.distributed.real_run import Run, write_recipe


def answers(run: Run, step: int) -> list[dict[str, Any]]:
    rows = map(json.loads, (run.folder / "completions.jsonl").read_text().splitlines())
    return [row for row in rows if row["train/step"] == step]


def test_answers_go_on_under_new_weights_and_from_a_checkpoint_on_another_number_of_ranks(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path,
        tiny_model(),
        run={"steps": 5},
        sampling={"max_tokens": 24},
        rollout={"slice_tokens": 5, "ahead": 1.0, "max_age": 5},
        checkpoint={"every": 1, "keep": 5, "export_hf": False},
        tracking={"completions_per_step": 100},
        policy={"lr": 3e-3},
    )
    run = Run(recipe)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    rows = run.rows()
    assert len(rows) == 5 and all(row["gap/max"] <= 1e-4 for row in rows)  # whatever the age of other tokens
    assert all(row["stale/share"] > 0 and row["stale/log_ratio"] > 1e-3 for row in rows[1:])
    assert max(row["stale/age_max"] for row in rows) <= 5 and any(row["carry/answers"] for row in rows)
    assert [len(answers(run, step)) for step in range(1, 6)] == [16] * 5  # four groups of four, complete
    trained = [row["prompt_id"] for step in range(1, 6) for row in answers(run, step) if not row["sample"]]
    assert len(set(trained)) == len(trained) == 20
    # One rank goes on with what two leaders have kept: of the next step all answers are the same, token by token, since
    # the weights are; from then on weights differ in the last bit, as sums over one rank and over two do.
    saved = next(step for step in range(2, 5) if rows[step - 1]["carry/answers"])
    resume = str(run.folder / "checkpoints" / f"step_{saved}")
    alone = Run(recipe, "--checkpoint.resume", resume, "--run.steps", str(saved + 1), ranks=1, name="alone")
    assert alone.wait() == 0, alone.output()
    alone.assert_gone()
    assert answers(alone, saved + 1) == answers(run, saved + 1)
    [again], before = alone.rows(), rows[saved]
    for key in (key for key in before if key.startswith(("carry/", "stale/share", "stale/age", "length/", "reward/"))):
        assert again[key] == before[key], key
