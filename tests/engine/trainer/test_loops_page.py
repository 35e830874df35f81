"""The loops of docs/loops.md run on a tiny model, shortened, and do what the page says."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.training_checks import plain_logprobs, plain_model

PAGE = (ROOT / "docs/loops.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a run of the arithmetic example starts from."""
    start = tmp_path / "runs/arithmetic_start"
    shutil.copytree(model, start / "model")
    (start / "data").mkdir()
    rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": "a"}) for n in range(64)]
    (start / "data/train.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(heading: str, *replaced: tuple[str, str], last: str = "", **changes: str) -> dict[str, Any]:
    """Run the block with this text in it, after replacing what makes it long; return its names.

    `replaced` are texts of it and others in their places, and `last` is a line at the end of its `with`.
    """
    [code] = [block for block in BLOCKS if heading in block]
    for old, new in replaced:
        assert code.count(old) == 1
        code = code.replace(old, new)
    code += f"    {last}\n"
    for old, new in changes.items():
        code = re.sub(rf"range\({old.removeprefix('steps_')}\)", f"range({new})", code)
    space: dict[str, Any] = {"__name__": "block"}
    exec(compile(code, "block", "exec"), space)
    return space


def test_supervised_training_lowers_the_loss_and_writes_the_model(folder: Path) -> None:
    space = run("training.export")
    loss = space["figures"]["loss"] / space["tokens"]
    assert loss < 0.5 * math.log(space["training"].policy.model.config.vocab_size)
    exported = plain_model(folder / "runs/mine/model")
    scores = [plain_logprobs(exported, datum) for datum in space["data"]]
    masks = [[weight > 0 for weight in datum.weights] for datum in space["data"]]
    total = sum(float(score[mask].sum().detach()) for score, mask in zip(scores, masks, strict=True))
    assert 0 < -total / space["tokens"] < loss + 0.05


def test_grpo_steps_on_fresh_answers(folder: Path) -> None:
    space = run("scores", steps_40="2")
    assert space["training"].version == 2 and len(space["training"].shifts) == 2
    assert len(space["data"]) == 256 and space["figures"]["gap_max"] < 1e-2
    assert len(space["rewards"]) == 256


def test_dpo_widens_the_margin(folder: Path) -> None:
    space = run("logsigmoid")
    assert space["figures"]["margin"] > 0.01 and space["figures"]["loss"] < math.log(2)


def test_best_of_n_learns_the_first_right_answer_of_each_group(folder: Path) -> None:
    rule = ('answer.text.strip() == row["answer"]', "sum(answer.token_ids) % 5 == 0")
    space = run("best = ", rule, last="after = training.logprobs(data)", steps_20="2")
    right = [[a for a in group if sum(a.token_ids) % 5 == 0] for group in space["groups"]]
    expected = [(g[0].prompt_ids + g[0].token_ids, g[0]) for g in right if g]
    assert 0 < len(expected) < len(right) == 32
    assert space["training"].version == 2
    gains = []
    for datum, (ids, best), after in zip(space["data"], expected, space["after"], strict=True):
        assert [datum.inputs[0], *datum.targets] == ids
        gains.append(float(after[-len(best.logprobs) :].sum()) - sum(best.logprobs))
    assert sum(gains) > 0


def test_self_play_moves_from_the_snapshots_to_what_wins(folder: Path) -> None:
    move = ("int(answer.text) if answer.text.isdecimal() else -1", "answer.token_ids[0]")
    often = ("step % 10 == 9", "step % 2 == 1")
    scores = "scores = [training.logprobs(data, weights=w) for w in [*rivals, None]]"
    space = run("rivals", move, often, last=scores, steps_30="4")
    assert [rival.version for rival in space["rivals"]] == [2, 4]
    assert {answer.weight_version for answer in space["theirs"]} == {2}
    games = zip(space["ours"], space["theirs"], strict=True)
    won = [(a.token_ids[0] > b.token_ids[0]) - (a.token_ids[0] < b.token_ids[0]) for a, b in games]
    assert [datum.advantages[-1] for datum in space["data"]] == won and {-1, 1} <= {*won}
    old, newest, present = ([float(score[-1]) for score in part] for part in space["scores"])
    assert newest == present != old
    gains = [now - answer.logprobs[0] for now, answer in zip(present, space["ours"], strict=True)]
    assert sum(gain * win for gain, win in zip(gains, won, strict=True)) > 0
