"""`hotbunk new`: the files fit each other and the checks before a run, and none is replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.released_models import write_config
from trainer import cli
from trainer.config.schema import PolicyConfig
from trainer.estimates.gpus import GPUS

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("with_model", [False, True], ids=["a tiny model", "a model of one's own"])
def test_the_written_recipe_passes_all_checks(
    with_model: bool,
    tmp_path: Path,
    tiny_model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder has a space in its name, and the commands that are printed work there."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my own", *(["--model", str(tiny_model())] if with_model else [])]) == 0
    assert "train 'my own/recipe.yaml'\n" in capsys.readouterr().out
    assert cli.main(["train", "my own/recipe.yaml", "--dry-run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["run"]["name"] == "my-own"
    assert resolved["model"]["path"] == (str(tiny_model()) if with_model else "my own/model")
    assert resolved["reward"]["functions"] == [
        {"name": "my own/reward.py:asked_for", "weight": 1.0, "kwargs": {}}
    ]
    assert cli.main(["new", "my own"]) == 2
    assert "my own/recipe.yaml exists already" in capsys.readouterr().err


def test_every_written_file_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = os.umask(0o027)
    try:
        assert cli.main(["new", "mine"]) == 0
    finally:
        os.umask(earlier)
    files = [file for file in (tmp_path / "mine").rglob("*") if file.is_file()]
    assert any(file.name == "model.safetensors" for file in files)
    assert {(file.name, oct(file.stat().st_mode & 0o777)) for file in files} == {
        (file.name, "0o640") for file in files
    }


@pytest.mark.parametrize(
    ("name", "gpu", "expected", "start"),
    [
        ("Qwen/Qwen3-4B", "h100", {"update_on": "device"}, ""),
        ("Qwen/Qwen3-4B", "rtx4090", {"update_on": "host"}, ""),
        ("unsloth/gpt-oss-20b-BF16", "l40s", {"update_on": "host"}, "NPROC_PER_NODE=2"),
    ],
)
def test_a_recipe_for_a_model_fits_the_gpu_that_is_asked_for(
    name: str,
    gpu: str,
    expected: dict[str, str],
    start: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plan of the written recipe says so, and the KV cache leaves less than a tenth of the device unused."""
    model = write_config(name, tmp_path / "model")
    assert cli.main(["new", str(tmp_path / "mine"), "--model", str(model), "--gpu", gpu]) == 0
    out = capsys.readouterr().out
    ranks = start.partition("=")[2] or "1"
    assert f"the recipe fits {ranks} x {gpu}" in out and start in out
    recipe = tmp_path / "mine" / "recipe.yaml"
    assert cli.main(["plan", str(recipe), "--gpu", gpu, "--ranks", ranks]) == 0
    plan = capsys.readouterr().out
    assert "It fits: no column takes more than 95%" in plan
    [sums] = [line.strip("│").split("│")[1:4] for line in plan.splitlines() if line.startswith("│ sum")]
    assert max(map(float, sums)) > 0.85 * GPUS[gpu].memory_gib
    policy = PolicyConfig.model_validate(yaml.safe_load(recipe.read_text())["policy"])
    assert {key: getattr(policy, key) for key in expected} == expected


def test_without_a_gpu_the_recipe_says_that_it_was_fitted_to_none(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["new", str(tmp_path / "mine"), "--model", "x"]) == 0
    assert "--gpu names the kind to fit it to" in capsys.readouterr().out
    assert cli.main(["new", str(tmp_path / "other"), "--model", str(tmp_path), "--gpu", "h100"]) == 0
    assert "holds no config.json" in capsys.readouterr().out


def test_the_readme_shows_the_written_files(tmp_path: Path) -> None:
    """The README has the recipe without its comments, the reward, and the first row."""
    command = [sys.executable, "-m", "trainer", "new", "mine", "--model", "x"]
    subprocess.run(
        command,
        cwd=tmp_path,
        check=True,
        timeout=120,
        capture_output=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (tmp_path / "mine/reward.py").read_text() in README
    assert (tmp_path / "mine/data.jsonl").read_text().splitlines()[0] in README
    recipe = yaml.safe_load(README.split("```yaml\n# mine/recipe.yaml\n")[1].split("```")[0])
    from trainer.commands import new

    texts = {
        "name": "mine",
        "model": "mine/model",
        "data": "mine/data.jsonl",
        "reward": '"mine/reward.py:asked_for"',
    }
    assert yaml.safe_load(new.RECIPE.format(**texts, **new.TINY)) == recipe
    assert all(
        json.loads(line)["prompt"] for line in (tmp_path / "mine/data.jsonl").read_text().splitlines()
    )
