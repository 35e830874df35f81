"""A whole run of a base-like model, whose chat template ends a turn with a token that is not EOS."""

from pathlib import Path

import pytest

from tests.support.real_run import Run, write_recipe
from tests.support.reciting_model import base_tokenizer, make_reciting_model
from tests.support.rows import read_rows, write_rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe for a model that answers 360 or 460, ends its turn, and would go on with 2525."""
    folder = tmp_path_factory.mktemp("ends")
    steps = {
        "\n": "34",
        "3": "6",
        "4": "6",
        "6": "0",
        "0": "<|im_end|>",
        "<|im_end|>": "2",
        "2": "5",
        "5": "2",
    }
    model = make_reciting_model(folder / "model", base_tokenizer(), steps)
    data = folder / "data.jsonl"
    write_rows(data, [{"prompt": f"{n}?", "answer": "360"} for n in range(8)])
    return write_recipe(
        folder,
        model,
        run={"steps": 2},
        data={"path": str(data), "max_prompt_tokens": 32},
        sampling={"max_tokens": 12},
        policy={"lr": 1e-6},
        reward={"functions": [{"name": "exact_match"}], "workers": 1},
        eval={"every": 2, "datasets": {"held_out": {"path": str(data)}}},
    )


def test_answers_of_a_base_model_end_where_the_template_ends_a_turn(recipe: Path) -> None:
    run = Run(recipe, ranks=1, preloaded=True)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    steps = [row for row in run.rows() if row["train/step"] > 0]
    assert [row["length/truncated"] for row in steps] == [0.0, 0.0]
    assert [row["length/max"] for row in steps] == [4.0, 4.0]
    assert all(0 < row["reward/mean"] < 1 for row in steps)
    # The end was sampled, so it is learned like the three digits.
    assert all(row["train_tokens"] == row["rollout_tokens"] == 4 * 16 for row in steps)
    assert max(row["gap/max"] for row in steps) < 1e-4
    answers = read_rows(run.folder / "completions.jsonl")
    assert {answer["text"] for answer in answers} == {"360", "460"}
    assert {(answer["text"], answer["reward"]) for answer in answers} == {("360", 1.0), ("460", 0.0)}
    assert {answer["finish_reason"] for answer in answers} == {"stop"}
    assert (
        "answers end with <|im_end|> (2), too: the chat template ends an answer with it" in run.output()
    )
