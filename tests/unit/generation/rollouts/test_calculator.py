"""The calculator agent's data and recipes: answers are right, transcripts show what they claim, files fit together."""

from pathlib import Path

import pytest

from generation.importing import load
from generation.rollouts.tools import parse_hermes
from scripts.examples.tasks.calculator import write_calculator
from tests.conftest import ROOT
from tests.support.rows import read_rows
from trainer.config.recipe import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    write_calculator(folder, train_size=200, eval_size=50, sft_size=300)
    return folder


def test_answers_are_right_and_prompts_are_held_out(folder: Path) -> None:
    train, held_out = read_rows(folder / "train.jsonl"), read_rows(folder / "eval.jsonl")
    assert len(train) == 200 and len(held_out) == 50
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train + held_out:
        assert int(row["answer"]) == eval(row["prompt"]) >= 0


def test_transcripts_call_the_recipes_own_tool_and_copy_what_it_says(folder: Path) -> None:
    """Transcripts call the recipe's tool and copy its results: two fifths guess, three tenths stop after one call, the
    rest are right.
    """
    calculate = load(f"{ROOT}/scripts/examples/calculator.py:calculate")
    answers = {row["prompt"]: row["answer"] for row in read_rows(folder / "train.jsonl")}
    calls = []
    for messages in (row["messages"] for row in read_rows(folder / "sft.jsonl")):
        *turns, last = messages[1:]
        for request, reply in zip(turns[::2], turns[1::2], strict=True):
            (call,) = parse_hermes(request["content"])
            assert call.name == "calculate" and str(calculate(**call.arguments)) == reply["content"]
        calls.append(len(turns) // 2)
        if calls[-1] == 2:
            assert last["content"] == turns[-1]["content"] == answers[messages[0]["content"]]
    shares = [calls.count(n) / len(calls) for n in (0, 1, 2)]
    assert shares == pytest.approx([0.4, 0.3, 0.3], abs=0.08)


def test_the_same_arguments_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_calculator(tmp_path, train_size=200, eval_size=50, sft_size=300)
    for name in ("train", "eval", "sft"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (folder / f"{name}.jsonl").read_bytes()


def test_the_recipes_follow_one_another() -> None:
    start, agent = (
        load_config(ROOT / f"scripts/recipes/{name}.yaml", [])
        for name in ("calculator_sft", "calculator")
    )
    assert str(start.run.folder / "model") == agent.model.path
    assert Path(start.data.path).parent == Path(agent.data.path).parent
    assert agent.rollout.max_turns > 2 and agent.rollout.tools == [
        "scripts/examples/calculator.py:calculate"
    ]
    assert (ROOT / agent.rollout.tools[0].partition(":")[0]).is_file()
