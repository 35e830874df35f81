"""A whole run whose answers continue from step to step: real ranks and engines, and a checkpoint in the middle."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.conftest import TinyModel
from tests.support.real_run import Run, write_recipe
from tests.support.rows import read_rows


def answers(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the rows of completions.jsonl from one step."""
    rows = read_rows(run.folder / "completions.jsonl")
    return [row for row in rows if row["train/step"] == step]


def test_answers_continue_under_new_weights_and_on_another_number_of_ranks(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """In the last step the engines have a stale row of one weight, which the gap shows at once."""
    model = tiny_model()
    recipe = write_recipe(
        tmp_path,
        model,
        run={"steps": 6},
        sampling={"max_tokens": 24},
        rollout={"slice_tokens": 5, "ahead": 3.0, "max_age": 7},
        checkpoint={"every": 1, "keep": 6, "export_hf": False},
        tracking={"completions_per_step": 100},
        policy={"lr": 3e-3},
    )
    stale = f"5:{AutoTokenizer.from_pretrained(model).convert_tokens_to_ids('=')}"
    run = Run(recipe, stale=stale, preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    rows = run.rows()
    assert [row["sync/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["gap/max"] for row in rows[:5]) <= 1e-5 and rows[5]["gap/max"] > 1e-3
    assert all(row["stale/share"] > 0 and row["stale/log_ratio"] > 1e-3 for row in rows[1:])
    assert 3 <= max(row["stale/age_max"] for row in rows) <= 7 and any(
        row["carry/answers"] for row in rows
    )
    assert [len(answers(run, step)) for step in range(1, 7)] == [16] * 6  # four groups of four, complete
    trained = [
        row["prompt_id"] for step in range(1, 7) for row in answers(run, step) if not row["sample"]
    ]
    assert len(set(trained)) == len(trained) == 24
    # One rank continues with the answers that two leaders saved. The next step's answers are equal, token by token,
    # since the weights are; from then on weights differ in the last bit, as sums over one rank and over two do.
    saved = next(step for step in range(2, 5) if rows[step - 1]["carry/answers"])
    resume = str(run.folder / "checkpoints" / f"step_{saved}")
    further = ["--checkpoint.resume", resume, "--run.steps", str(saved + 1)]
    alone = Run(recipe, *further, ranks=1, name="alone", preloaded=True)
    assert alone.wait() == 0, alone.output()
    alone.assert_gone()
    assert answers(alone, saved + 1) == answers(run, saved + 1)
    [again], before = alone.rows(), rows[saved]
    for key in (
        key
        for key in before
        if key.startswith(("carry/", "stale/share", "stale/age", "length/", "reward/"))
    ):
        assert again[key] == before[key], key
