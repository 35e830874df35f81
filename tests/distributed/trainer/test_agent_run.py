"""A whole run with episodes of several turns: real ranks and engines, exact ids from the first turn to the update."""

from pathlib import Path

from tests.conftest import TinyModel
from tests.support.real_run import ROOT, Run, write_recipe
from tests.support.rows import read_rows


def test_episodes_of_several_turns_train_on_two_ranks(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The trainer's log-probabilities of all turns are the engines' in every step: same ids, same masks, same weights.

    The rollout is the example's, named by its file, with a setting of its own.
    """
    rollout = {
        "custom": f"{ROOT}/scripts/examples/second_look.py:second_look",
        "kwargs": {"looks": 2, "bonus": 0.5},
    }
    sizes = {"engine": {"max_model_len": 128}, "run": {"steps": 3}, "algorithm": {"kl_coef": 0.01}}
    run = Run(write_recipe(tmp_path, tiny_model(), rollout=rollout, **sizes), preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    rows = run.rows()
    assert [row["turns/mean"] for row in rows] == [3.0] * 3
    assert max(row["gap/max"] for row in rows) <= 1e-4
    # The policy sampled three answers of at most 6 tokens, but not the prompts (about 20 tokens) or "Look again.".
    assert all(row["length/max"] <= 18 and row["rollout/failed"] == 0 for row in rows)
    assert all(row["train_tokens"] == row["rollout_tokens"] for row in rows)
    completions = read_rows(run.folder / "completions.jsonl")
    assert all(completion["text"].count("Look again.") == 2 for completion in completions)
    assert [row["sync/version"] for row in rows] == [1.0, 2.0, 3.0]
