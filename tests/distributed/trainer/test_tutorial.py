"""The tutorial's commands in order, with fewer steps, print what its page shows and resume as it says."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.real_run import Run
from trainer.cli import main

PAGE = (ROOT / "docs/tutorial.md").read_text()
SHORT = ["--run.steps", "6", "--checkpoint.every", "2", "--tracking.wandb", "disabled"]


def command(beginning: str) -> list[str]:
    """Return the arguments of the page's command that begins like this."""
    (line,) = re.findall(rf"^\.venv/bin/hotbunk ({beginning}.*)$", PAGE, re.MULTILINE)
    return shlex.split(line)


def page_shows(text: str) -> bool:
    """Return True if the page shows this text, whatever its numbers."""
    return re.sub(r"\d+", "N", text) in re.sub(r"\d+", "N", PAGE)


def test_commands_of_the_tutorial_do_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long run with the first reward is left out: the run with the second one is interrupted and resumed."""
    monkeypatch.chdir(tmp_path)
    assert main(command("new")) == 0
    assert page_shows(capsys.readouterr().out.splitlines()[0])
    rewards = tmp_path / "mine/reward.py"
    first, second = re.findall(r"^```python\n(def .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert rewards.read_text() == first
    rewards.write_text(f"{first}\n\n{second}")
    assert main(command("train mine/recipe.yaml --dry-run")) == 0
    assert "policy:\n" in capsys.readouterr().out
    # The forked launcher works in another folder.
    words = [
        word.replace("mine/", f"{tmp_path}/mine/")
        for word in command("train mine/recipe.yaml --run.name varied")
    ]
    recipe = tmp_path / "mine/recipe.yaml"
    options = [*words[4:], *SHORT, "--run.output_dir", f"{tmp_path}/mine/runs"]
    recipe.write_text(recipe.read_text().replace("mine/", f"{tmp_path}/mine/"))
    run = Run(recipe, *options, ranks=1, name="varied", preloaded=True)
    run.wait_for_steps(3)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    assert page_shows(
        next(line for line in run.output().splitlines() if "interrupted by SIGINT" in line).partition(
            " step"
        )[0]
    )
    before = run.rows()
    resumed = Run(recipe, *options, ranks=1, name="varied", preloaded=True)
    assert resumed.wait() == 0, resumed.output()
    resuming = next(line for line in resumed.output().splitlines() if "resuming from" in line)
    assert page_shows(resuming.replace(f"{tmp_path}/mine/", ""))
    rows = [row for row in resumed.rows() if row["train/step"] == before[-1]["train/step"]]
    assert {row["reward/mean"] for row in rows} == {before[-1]["reward/mean"]}
    monkeypatch.chdir(tmp_path / "mine")
    assert main(command("report")) == 0
    assert page_shows(capsys.readouterr().out.splitlines()[-1])
