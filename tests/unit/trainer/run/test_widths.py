"""Terminals of 80 and 120 columns: runs, evaluations, plans and the doctor's table, compared with kept screens.

After a change that is meant, `KEEP_SCREENS=1 .venv/bin/python -m pytest -n 0 tests/unit/trainer/run/test_widths.py`
writes the screens again; look at them before they are committed.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from tests.unit.trainer.commands.test_doctor import LAPTOP, NODE
from tests.unit.trainer.run.test_progress import FULL, report
from trainer.cli import main
from trainer.commands import doctor
from trainer.commands.eval import tables
from trainer.run.screen import Progress, make_console

SCREENS = Path(__file__).with_name("screens")
WIDE = 400
WIDTHS = (80, 120)
BOXES = re.compile(r"[^\w\s.,:;%±→|/+()=-]")
SAMPLED = {"accuracy": 0.8125, "accuracy_standard_error": 0.0488, "pass@1": 0.8125, "pass@4": 0.9375}
SAMPLED |= {
    "majority@1": 0.8125,
    "majority@4": 0.875,
    "reward": 0.853,
    "length": 123.45,
    "truncated": 0.02,
}


@dataclass
class Screen:
    """A terminal without colours, whose width can be set."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def show(self, draw: Callable[[], object], width: int) -> str:
        """Return what `draw` prints on a terminal of this width."""
        self.monkeypatch.setenv("COLUMNS", str(width))
        self.monkeypatch.setenv("FORCE_COLOR", "1")
        self.monkeypatch.setattr("trainer.run.screen.WIDTH", max(width, 120))
        self.capsys.readouterr()
        draw()
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self.capsys.readouterr().out).splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Screen:
    return Screen(monkeypatch, capsys)


def words(text: str) -> set[str]:
    """Return the words on a screen, without what boxes are drawn with."""
    return set(BOXES.sub(" ", text).split())


def check(screen: Screen, name: str, draw: Callable[[], object]) -> None:
    """Assert that no line is too long, no word is cut, and the screens are the kept ones."""
    wide = words(screen.show(draw, WIDE))
    for width in WIDTHS:
        text = screen.show(draw, width)
        assert max(map(len, text.splitlines())) <= width
        assert words(text) <= wide
        file = SCREENS / f"{name}_{width}.txt"
        if os.environ.get("KEEP_SCREENS"):
            file.write_text(text)
        assert text == file.read_text()


def test_a_run_has_fewer_columns_on_a_narrow_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 30))

    def draw() -> None:
        monkeypatch.setattr("trainer.run.screen.own_command", lambda: "hotbunk")
        monkeypatch.setattr("trainer.run.screen.time.monotonic", lambda: float(next(clock)))
        progress = Progress(400, enabled=True)
        progress.note("3,148,288 parameters on 2 ranks")
        progress.step(1, FULL)
        progress.step(2, FULL | {"reward/mean": -1.0})
        progress.step(3, FULL | {"skipped_steps": 2.0})
        progress.step(4, FULL | {"stale/share": 0.25})
        progress.report(report())

    check(screen, "run", draw)
    assert "left" in screen.show(draw, 40)  # the last column to go


def test_an_evaluation_with_k_has_a_column_for_each_dataset(screen: Screen) -> None:
    sampled = {"prompts": 64, "answers": 256} | SAMPLED
    names = ["held_out", "aime_2025", "gsm8k", "math_500", "olympiad"]
    results = {"model": "m", "seconds": 61.5, "datasets": dict.fromkeys(names, sampled)}

    def draw() -> None:
        console = make_console()
        for table in tables(results, console.width):
            console.print(table)

    check(screen, "eval", draw)
    for width in WIDTHS:
        text = screen.show(draw, width)
        assert all(text.count(f"{name} ┃") == 1 for name in names)
        assert text.count("0.938") == len(names)  # pass@4


def test_a_plan_is_readable(
    screen: Screen, tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No screen is kept, since the figures change with the estimates."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(tiny_qwen2)
    sizes = {
        "data": {"path": "d.jsonl"},
        "sampling": {"max_tokens": 64},
        "engine": {"max_model_len": 2048},
    }
    Path("small.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}} | sizes))
    Path("d.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')

    def draw() -> None:
        assert main(["plan", "small.yaml", "--reward.functions", "[exact_match]", "--gpu", "h100"]) == 0

    wide = words(screen.show(draw, WIDE))
    for width in WIDTHS:
        text = screen.show(draw, width)
        assert max(map(len, text.splitlines())) <= width
        assert words(text) <= wide


GPU = replace(NODE.devices[0], uuid="GPU-6d3c1f52-9a1b-4c0e-8a77-0f2b9d5e4c11")


@pytest.mark.parametrize(
    ("name", "machine"), [("doctor_node", replace(NODE, devices=(GPU, GPU))), ("doctor_laptop", LAPTOP)]
)
def test_the_table_of_the_doctor_is_readable(screen: Screen, name: str, machine: doctor.Machine) -> None:
    # Remedies wrap by themselves
    findings = [finding for finding in doctor.judge(machine) if not finding.remedy]
    check(screen, name, lambda: doctor.show(findings))
