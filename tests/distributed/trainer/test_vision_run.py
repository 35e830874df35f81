"""Whole runs of a multimodal model: one is killed in the middle, and one has an OpenAI client.

`tests/support/killed_run.py --images` kills more often.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_run import Disturbance, disturbed, unequal
from tests.support.launch import run_ranks
from tests.support.real_run import ROOT, Run, multimodal_sections, write_recipe
from tests.support.rows import read_rows, write_rows
from trainer.commands import sft
from trainer.config.recipe import load_config

MULTIMODAL: dict[str, Any] = {"preloaded": True}


@pytest.mark.timeout(1500)
def test_a_killed_run_with_images_equals_the_undisturbed_one_bit_for_bit(tmp_path: Path) -> None:
    """Rows have 0, 1 or 2 images, answers are carried from step to step, and evaluation has pass@2."""
    model, sections = multimodal_sections(tmp_path)
    sections["eval"] |= {"every": 2, "samples": 2, "temperature": 1.0, "k": [1, 2]}
    recipe = write_recipe(
        tmp_path,
        model,
        **sections,
        run={"steps": 4},
        checkpoint={"every": 1},
        sampling={"max_tokens": 9},
        rollout={"slice_tokens": 3, "ahead": 1.0},
    )
    straight = Run(recipe, ranks=1, name="straight", **MULTIMODAL)
    assert straight.wait() == 0, straight.output()
    straight.assert_gone()
    rows = straight.rows()
    assert max(row["gap/max"] for row in rows[1:]) <= 1e-4
    assert any(row.get("carry/answers") for row in rows) and all(
        "eval/pass@2" in rows[step] for step in (0, 2, 4)
    )
    kill = Disturbance("rollout", "rank", signal.SIGKILL, 2, 0.05)
    broken = disturbed(recipe, [kill], ranks=1, seed=0, **MULTIMODAL)
    assert broken.failures == [] and unequal(straight, broken.run) == []


@pytest.mark.timeout(600)
def test_two_steps_with_images_whose_lines_end_with_marks(tmp_path: Path) -> None:
    """Ministral 3's: the marks keep their embeddings in engine and trainer."""
    model, sections = multimodal_sections(tmp_path, architecture="mistral3")
    run = Run(
        write_recipe(tmp_path, model, **sections, run={"steps": 2}), ranks=1, name="marks", **MULTIMODAL
    )
    assert run.wait() == 0, run.output()
    run.assert_gone()
    assert [row["gap/max"] <= 1e-4 for row in run.rows()] == [True, True]


def warm_start(recipe: str) -> None:
    """Run `hotbunk sft` on one rank."""
    sft.main(load_config(Path(recipe), ["run.name=warm"]))


@pytest.mark.timeout(600)
def test_a_client_that_adds_an_image_trains_from_a_warm_start(tmp_path: Path) -> None:
    """The example of scripts/ makes two steps at level 6, from the model of `hotbunk sft` on the same rows."""
    model, sections = multimodal_sections(tmp_path)
    rows = [{"prompt": "Name it: ", "image": f"{28 * n}.png", "answer": str(n)} for n in (1, 2, 3)] * 4
    data = tmp_path / "named.jsonl"
    write_rows(data, rows)
    keys = sections["data"] | {"path": str(data), "answer_key": "answer"}
    recipe = write_recipe(
        tmp_path,
        model,
        data=keys,
        engine={"max_model_len": 128},
        run={"steps": 2, "device": "cpu"},
        sft={"steps": 3, "batch_size": 6, "lr": 1e-3},
        rollout={"client": f"{ROOT}/scripts/examples/second_glance.py:agent", "max_error_rate": 0.0},
        reward={"functions": []},
    )
    output = run_ranks(warm_start, 1, timeout=120, arguments=[str(recipe)])
    warm = tmp_path / "runs/warm/model"
    assert "the model is in" in output and (warm / "model.safetensors").is_file()
    run = Run(recipe, "--model.path", str(warm), ranks=1, name="shown", **MULTIMODAL)
    assert run.wait() == 0, run.output()
    run.assert_gone()
    assert [row["gap/max"] <= 1e-4 for row in run.rows()] == [True, True]
    completions = read_rows(run.folder / "completions.jsonl")
    assert len(completions) > 4 and {len(answer["images"]) for answer in completions} == {2}
