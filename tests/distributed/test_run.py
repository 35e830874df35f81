"""Whole runs: real torchrun ranks, real engines, real signals. The slowest tests of all, so each checks much."""

import json
import signal
from pathlib import Path

import pytest
from conftest import TinyModel
from real_run import Run, differences, write_recipe


def test_p19_p20_a_run_killed_and_resumed_equals_one_that_was_not(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Bit for bit, with the engine's packed weights: unpacked ones go through MKL, whose last bit depends on how many
    requests happen to be decoded together."""
    recipe = write_recipe(tmp_path, tiny_model(), checkpoint={"every": 2}, eval={"every": 2})
    whole = Run(recipe, name="whole")
    assert whole.wait() == 0, whole.output()
    whole.assert_gone()
    broken = Run(recipe, "--run.steps", "1000", name="broken")
    broken.wait_for_steps(4)  # the first evaluation and three steps: one more than the last checkpoint has
    broken.ranks()[1].send_signal(signal.SIGKILL)
    assert broken.wait() != 0
    broken.assert_gone()
    resumed = Run(recipe, name="broken")
    assert resumed.wait() == 0, resumed.output()
    resumed.assert_gone()
    assert differences(whole.comparable_rows(), resumed.comparable_rows()) == []
    rows = whole.rows()
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3, 4]
    assert max(row["gap/max"] for row in rows[1:]) <= 1e-4
    summary = json.loads((whole.folder / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["syncs_verified"] == 7  # four steps, three evaluations
    for name in ("config.yaml", "completions.jsonl", "curves.png", "model/model.safetensors", "model/tokenizer.json"):
        assert (whole.folder / name).stat().st_size > 0


@pytest.mark.parametrize("plain", [True, False], ids=["in-place", "layerwise"])
def test_tensor_parallel_engine_of_two_ranks(tiny_model: TinyModel, tmp_path: Path, plain: bool) -> None:
    engine = {"tensor_parallel_size": 2, "plain_cpu_weights": plain}
    run = Run(write_recipe(tmp_path, tiny_model(), run={"steps": 2}, engine=engine))
    assert run.wait() == 0, run.output()
    run.assert_gone()
    assert [row["sync/verified"] for row in run.rows()] == [1, 2]
    assert max(row["gap/max"] for row in run.rows()) <= 1e-4


def test_p24_two_runs_side_by_side_both_finish(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), run={"steps": 2})
    runs = [Run(recipe, name=name, ranks=1) for name in ("left", "right")]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output() + runs[1].output()
    for run in runs:
        run.assert_gone()
    assert differences(runs[0].comparable_rows(), runs[1].comparable_rows()) == []


ENDINGS = {
    "launcher-INT-at-init": (0, "launcher", signal.SIGINT, "SIGINT"),
    "launcher-TERM-in-a-step": (2, "launcher", signal.SIGTERM, "SIGTERM"),
    "launcher-KILL-in-a-step": (2, "launcher", signal.SIGKILL, ""),
    "rank-KILL-at-init": (0, "rank", signal.SIGKILL, ""),
    "rank-TERM-in-a-step": (2, "rank", signal.SIGTERM, "rank 1: interrupted by SIGTERM"),
    "engine-KILL-in-a-step": (2, "engine", signal.SIGKILL, "EngineDeadError"),
}


@pytest.mark.parametrize(("rows", "victim", "number", "culprit"), ENDINGS.values(), ids=ENDINGS)
def test_p24_whatever_ends_a_run_nothing_is_left(
    tiny_model: TinyModel, tmp_path: Path, rows: int, victim: str, number: signal.Signals, culprit: str
) -> None:
    run = Run(write_recipe(tmp_path, tiny_model(), run={"steps": 100000}, checkpoint={"every": 1}))
    try:
        run.wait_for(lambda: len(run.processes("trainer")) >= 3, "ranks")
        run.wait_for_steps(rows)
        run.left_behind()  # remembers what there is to look for
        if victim == "launcher":
            run.process.send_signal(number)
        elif victim == "rank":
            run.ranks()[1].send_signal(number)
        else:
            run.engines()[0].send_signal(number)
        run.assert_gone()
        assert run.wait(5) != 0
        assert culprit in run.output()
    finally:
        run.kill_everything()


def test_a_step_over_its_deadline_names_ranks_phases_and_stacks(tiny_model: TinyModel, tmp_path: Path) -> None:
    limits = {"steps": 100000, "step_deadline_s": 5, "first_step_deadline_s": 240}
    run = Run(write_recipe(tmp_path, tiny_model(), run=limits))
    try:
        run.wait_for_steps(2)
        run.engines()[0].send_signal(signal.SIGSTOP)
        assert run.wait(60) != 0
        run.assert_gone()
    finally:
        run.kill_everything()
    assert "exceeded a deadline" in run.output()
    for rank in (0, 1):
        assert f"rank {rank}: phase " in run.output()
    assert "generation/event_loop.py" in run.output()  # where the main thread of a rank was waiting
