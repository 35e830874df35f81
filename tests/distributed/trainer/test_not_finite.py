"""A step of a broken model is not a step without signal: non-finite weights end the run."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.conftest import TinyModel
from tests.support.real_run import Run, write_recipe


def test_weights_that_are_not_finite_end_the_run_and_are_named(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """One row of a norm on the second rank is NaN: every answer is empty, and no reward differs."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][-1] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    recipe = write_recipe(
        tmp_path,
        model,
        run={"steps": 2},
        engine={"plain_cpu_weights": True},  # a check of digests passes, since the bits are equal
        policy={"offload": "all"},
        reward={"functions": [{"name": "exact_match"}]},
    )
    run = Run(recipe, preloaded=True)
    assert run.wait() != 0, run.output()
    run.assert_gone()
    words = " ".join(run.output().split())
    assert "sampled a token with a log-probability of nan; the policy's parameter" in words, run.output()
    assert "parameter model.layers.1.input_layernorm.weight holds values that are not finite" in words, (
        run.output()
    )
    assert run.rows() == [] and not (run.folder / "summary.json").exists()
