"""Our packages run in a folder that has its own trainer, generation and sharding; its other code is found."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.conftest import TinyModel

ROOT = Path(__file__).resolve().parents[3]
WITNESS = """
import multiprocessing, os

def testify():
    import generation.engine, sharding.ranks, trainer.errors
    with open(f"witness-{os.getpid()}", "w") as file:
        print(generation.__file__, sharding.__file__, trainer.__file__, file=file)

def reward(completion):
    return 0.0

if multiprocessing.parent_process() is None:
    testify()
    spawned = multiprocessing.get_context("spawn").Process(target=testify)  # as vLLM starts its processes
    spawned.start()
    spawned.join()
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: TinyModel) -> Path:
    for name in ("trainer", "generation", "sharding"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package of the user')")
    (tmp_path / "witness.py").write_text(WITNESS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    recipe = {
        "run": {"output_dir": "runs", "device": "cpu"},
        "model": {"path": str(tiny_model())},
        "data": {"path": "rows.jsonl"},
        "batch": {"prompts_per_step": 2},
        "reward": {"functions": [{"name": "witness:reward"}]},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def processes(folder: Path, command: Sequence[str], **environment: str) -> int:
    """Count the processes that imported the user's module in a dry run; each must have imported our packages."""
    done = subprocess.run(
        [*command, "train", "recipe.yaml", "--dry-run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "prompts_per_step: 2" in done.stdout, done.stderr
    ours = [f"{ROOT}/{name}/__init__.py" for name in ("generation", "sharding", "trainer")]
    witnesses = [file.read_text().split() for file in folder.glob("witness-*")]
    assert all(paths == ours for paths in witnesses), witnesses
    return len(witnesses)


def test_the_console_script_runs_ours_here_and_in_spawned_processes(folder: Path) -> None:
    script = folder / "bin" / "hotbunk"  # as pip writes it
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom hotbunk.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    assert processes(folder, [sys.executable, str(script)]) == 2


def test_the_ranks_that_the_launcher_starts_run_ours(folder: Path) -> None:
    launcher = [sys.executable, "-m", "trainer.launcher", "--nproc-per-node", "1", "-m", "trainer"]
    assert processes(folder, launcher, PYTHONSAFEPATH="1") == 2  # as scripts/train.sh sets it
