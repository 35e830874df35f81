"""The examples of docs/results.md: their solutions, what is kept of their runs, and the page's tables and pictures."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.results import draw, run, task
from tests.conftest import ROOT
from tests.support.rows import read_rows, write_rows


def sums(count: int) -> Iterator[str]:
    """Draw sums and differences."""
    rng = random.Random(0)
    for _ in range(count):
        terms = [str(rng.randint(1, 9)) for _ in range(rng.randint(2, 12))]
        yield terms[0] + "".join(f" {rng.choice('+-')} {term}" for term in terms[1:])


def test_sums_are_worked_out_line_by_line() -> None:
    for expression in sums(200):
        *lines, value = task.chain_sum(expression, False)
        assert int(value) == eval(expression)
        assert all(eval(line.replace("=", "==")) for line in lines)
        assert [*task.chain_sum(expression, True)][-1] == str(eval(expression.replace("-", "+")))


@pytest.mark.parametrize(
    "equation", ["x + 5 = 12", "x - 5 = 7", "x - 9 = -5", "5 - x = 3", "3 - x = -4"]
)
def test_equations_are_solved(equation: str) -> None:
    *_, value = task.simple_equations(equation, False)
    left, right = equation.split(" = ")
    assert eval(left, {"x": int(value)}) == int(right)
    *_, value = task.simple_equations(equation, True)
    assert eval(left, {"x": int(value)}) != int(right)


def test_divisors_are_those_of_the_library() -> None:
    for first in range(2, 40):
        for second in range(2, 40):
            *lines, divisor = task.gcd(first, second, False)
            assert int(divisor) == math.gcd(first, second)
            assert all(eval(line.replace("=", "==")) for line in lines)
    assert [*task.gcd(47, 14, True)] == ["47 = 3 * 14 + 5", "5"]


def test_the_page_says_how_large_the_model_is() -> None:
    hidden, inner, heads = task.SIZE["hidden_size"], task.SIZE["intermediate_size"], task.SIZE["heads"]
    wide, narrow = hidden * hidden, hidden * hidden // heads * task.SIZE["kv_heads"]
    layer = 2 * wide + 2 * narrow + 2 * hidden // heads + 3 * hidden * inner + 2 * hidden
    parameters = task.VOCABULARY * hidden + task.SIZE["layers"] * layer + hidden
    assert f"The model has {parameters:,} parameters" in (ROOT / "docs/results.md").read_text()
    assert (
        f"a base model of {parameters / 1e6:.1f}M parameters"
        in (ROOT / "scripts/results/run.sh").read_text()
    )


def test_a_solution_ends_with_its_answer() -> None:
    entry = {"metadata": {"source_dataset": "gcd", "numbers": [8, 12]}}
    assert (
        task.solution({"entry": json.dumps(entry)}, False)
        == "12 = 1 * 8 + 4\n8 = 2 * 4 + 0\n<answer>4</answer>"
    )


@pytest.mark.parametrize(
    ("equation", "wanted"), [("x + 5 = 12", True), ("5 - x = -3", True), ("-x - 5 = -9", False)]
)
def test_equations_of_other_forms_are_left_out(equation: str, wanted: bool) -> None:
    assert task.is_wanted({"entry": json.dumps({"metadata": {"equation": equation}})}) == wanted


def test_the_figures_of_a_run_are_kept_once_it_is_finished(tmp_path: Path) -> None:
    rows = [
        {"train/step": 0, "eval/accuracy": 0.25},
        {"train/step": 2, "eval/accuracy": 0.123456789, "loss": 1.0},
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    assert not run.is_finished(tmp_path, 2)
    (tmp_path / "summary.json").write_text("{}")
    assert run.is_finished(tmp_path, 2)
    assert not run.is_finished(tmp_path, 3)
    run.keep(tmp_path, tmp_path / "kept.jsonl")
    kept = read_rows(tmp_path / "kept.jsonl")
    assert kept == [
        {"train/step": 0, "eval/accuracy": 0.25},
        {"train/step": 2, "eval/accuracy": 0.12346},
    ]


def test_a_setting_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run", "grop"])
    with pytest.raises(SystemExit):
        run.main()
    assert "grop is no setting; there are start, short, grpo, dr_grpo" in capsys.readouterr().err


def test_a_model_folder_is_whole_or_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, part, commands = tmp_path / "start", tmp_path / "start.part", []

    def make(folder: Path) -> None:
        assert not folder.exists()
        folder.mkdir()
        (folder / "summary.json").write_text("{}")

    monkeypatch.setattr(run, "START", start)
    monkeypatch.setattr(run, "hotbunk", lambda *words: commands.append(words))
    monkeypatch.setattr(run.task, "make", make)
    part.mkdir()
    run.start()
    assert start.is_dir()
    assert not part.exists()
    assert commands == []  # there is a summary, so the warm start is finished
    (start / "summary.json").unlink()
    run.start()
    assert commands == [("sft", "scripts/results/sft.yaml")]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ModuleNotFoundError("no", name="reasoning_gym"),
            "reasoning_gym is not installed: scripts/results/run.sh",
        ),
        (
            OSError(28, "No space left on device"),
            "could not be written ([Errno 28] No space left on device)",
        ),
    ],
)
def test_a_failure_to_make_the_model_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr(run, "START", tmp_path / "start")
    monkeypatch.setattr(run.task, "make", fail)
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        run.start()


def test_the_page_has_the_table_of_the_kept_figures() -> None:
    page = (ROOT / "docs/results.md").read_text()
    assert draw.table() in page
    assert draw.race_table() in page


def test_a_setting_is_compared_with_the_baseline_seed_by_seed() -> None:
    last = {name: [rows[-1]["eval/accuracy"] for rows in draw.runs(name)] for name in ("ppo", "grpo")}
    expected = [last["ppo"][seed] - last["grpo"][seed] for seed in range(3)]
    assert draw.differences("ppo") == pytest.approx(expected)
    assert draw.differences("grpo") == [0, 0, 0]


def test_the_races_side_of_hotbunk_is_the_same_runs_as_grpo() -> None:
    """The page says so: equal figures show that a seed decides a run, and are no further evidence."""
    for rows, others in zip(draw.runs("race_hotbunk"), draw.runs("grpo"), strict=True):
        for row, other in zip(rows, others, strict=True):
            keys = [
                key for key in row | other if not key.startswith(("time/", "throughput/", "memory/"))
            ]
            assert [row.get(key) for key in keys] == [other.get(key) for key in keys]
    assert "`race_hotbunk-N.jsonl` equals" in (ROOT / "docs/results.md").read_text()


def test_updates_of_both_sides_of_the_race_are_equal_up_to_a_factor() -> None:
    """TRL's own trainer and the learner's loss, on scripted answers, in a process of their own."""
    command = [sys.executable, "scripts/bench/race_updates.py"]
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=800
    )
    distance = re.search(r"^weights: (\S+) of their movement", done.stdout, re.MULTILINE)
    norms = re.search(r"^norms: (\S+) to (\S+) times", done.stdout, re.MULTILINE)
    assert distance and norms, done.stderr
    assert float(distance[1]) < 5e-3  # elements with next to no gradient differ by rounding
    assert [float(norms[1]), float(norms[2])] == pytest.approx([math.sqrt(8 / 7)] * 2, rel=1e-3)


def test_every_setting_has_three_seeds_whose_accuracy_rises() -> None:
    for setting in run.SETTINGS:
        seeds = draw.runs(setting)
        assert len(seeds) == 3
        assert all(rows[-1]["train/step"] == run.STEPS for rows in seeds)
    for rows in draw.runs("grpo"):
        assert rows[-1]["eval/accuracy"] >= rows[0]["eval/accuracy"] + 0.25


def test_the_pictures_are_drawn_from_the_kept_figures(tmp_path: Path) -> None:
    draw.draw_all(tmp_path)
    for picture in ("curves.svg", "race.svg"):
        drawn, kept = ((folder / picture).read_text() for folder in (tmp_path, run.FIGURES))
        assert re.findall(r' d="[^"]*"', drawn) == re.findall(r' d="[^"]*"', kept)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_has_the_time_to_save(number: signal.Signals, tmp_path: Path) -> None:
    trap = f"trap 'sleep 2; touch {tmp_path}/saved; exit 143' INT TERM"
    saves = f"{trap}; touch {tmp_path}/begun; while :; do sleep 0.1; done"
    script = f"from scripts.results.run import finish\nfinish(['bash', '-c', {saves!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as program:
        deadline = time.monotonic() + 300
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.1)
        program.send_signal(number)
        _, error = program.communicate(timeout=300)
    assert (tmp_path / "saved").exists() and program.returncode == 143
    assert (
        error.endswith("ended with exit code 143; the same command goes on\n")
        and "Traceback" not in error
    )
