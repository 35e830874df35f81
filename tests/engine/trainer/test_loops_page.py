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


def run(heading: str, **changes: str) -> dict[str, Any]:
    """Run the block with this text in it, after replacing what makes it long; return its names."""
    [code] = [block for block in BLOCKS if heading in block]
    for old, new in changes.items():
        code = re.sub(rf"range\({old.removeprefix('steps_')}\)", f"range({new})", code)
    space: dict[str, Any] = {"__name__": "block"}
    exec(compile(code, "block", "exec"), space)
    return space


def test_supervised_training_lowers_the_loss_and_writes_the_model(folder: Path) -> None:
    space = run("cross_entropy")
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
