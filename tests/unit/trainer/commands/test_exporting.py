"""An unfinished run can be tried: the exported policy of a checkpoint equals an export by the policy itself."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.support.recipes import make_config
from trainer.build import build_models
from trainer.cli import main
from trainer.commands import generate
from trainer.commands.eval import evaluation_config
from trainer.commands.generate import engine_settings, model_folder, run_folder, training_sampling
from trainer.config.recipe import load_config, to_yaml
from trainer.config.schema import TrainConfig
from trainer.run import checkpoint


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export in this process, since another one takes ten seconds for its imports."""
    monkeypatch.setattr(
        generate, "ProcessPoolExecutor", lambda number, context: ThreadPoolExecutor(number)
    )


KINDS: dict[str, dict[str, Any]] = {
    "tiny_qwen2": {"policy": {"dtype": "float32"}},
    "tiny_qwen2_untied": {"policy": {"dtype": "bfloat16", "freeze": ["model.embed_tokens"]}},
    "tiny_moe": {"policy": {"dtype": "bfloat16"}},  # fused experts, which are apart in files
    "tiny_llama": {"policy": {"dtype": "bfloat16"}, "lora": {"rank": 2, "seed": 5}},
}


def trained(config: TrainConfig, steps: list[int]) -> dict[int, Path]:
    """Save checkpoints of a policy that changes between them, each with what the policy itself exports then."""
    policy, _, _ = build_models(config, torch.device("cpu"))
    expected = {}
    config.run.folder.mkdir(parents=True, exist_ok=True)
    (config.run.folder / "config.yaml").write_text(to_yaml(config))
    for step in steps:
        with torch.no_grad():
            for parameter in policy.trained().values():  # type: ignore[attr-defined]
                parameter.add_(0.01 * step)
        checkpoint.save(config.run.folder / "checkpoints", step, {"policy": policy}, {})
        expected[step] = config.run.folder.parent / f"expected_{step}"
        policy.save_pretrained(expected[step])
    return expected


def recipe(folder: Path, model: Path, **sections: Any) -> TrainConfig:
    run = {"name": "mine", "output_dir": str(folder), "device": "cpu"}
    reward = {"functions": [{"name": "exact_match"}]}
    paths = {"model": {"path": str(model)}, "data": {"path": "x"}, "sampling": {"max_tokens": 9}}
    return make_config({"run": run, "reward": reward}, paths, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_of_a_checkpoint_is_exported_as_by_the_policy_itself(
    kind: str,
    request: pytest.FixtureRequest,
    one_rank: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind == "tiny_llama":
        pytest.importorskip("peft")
    config = recipe(tmp_path, request.getfixturevalue(kind), **KINDS[kind])
    expected, run = trained(config, [3, 10]), config.run.folder
    chosen = {10: model_folder(str(run)), 3: model_folder(str(run), 3)}
    for step, folder in chosen.items():
        assert (
            f"the policy of {run}/checkpoints/step_{step}, after step {step}\n"
            in capsys.readouterr().err
            or step == 3
        )
        assert folder == run / f"model_step_{step}"
        weights, wanted = (
            load_file(folder / "model.safetensors"),
            load_file(expected[step] / "model.safetensors"),
        )
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert (folder / "config.json").read_text() == (expected[step] / "config.json").read_text()
        assert training_sampling(folder)["max_tokens"] == 9 and (folder / "tokenizer.json").is_file()


@pytest.fixture
def run(one_rank: None, tiny_qwen2: Path, tmp_path: Path) -> Path:
    config = recipe(tmp_path, tiny_qwen2)
    trained(config, [3, 10])
    return config.run.folder


def test_every_command_takes_a_run_or_a_checkpoint_of_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_3, step_10 = run / "model_step_3", run / "model_step_10"
    assert engine_settings(str(run)).model == str(step_10)  # of generate and serve
    assert (
        engine_settings(str(run), 3).model
        == engine_settings(f"{run}/checkpoints/step_3").model
        == str(step_3)
    )
    assert evaluation_config(str(run), None, []).model.path == str(step_10)
    assert evaluation_config(str(run), None, [], 3).model.path == str(step_3)
    assert evaluation_config(f"{run}/checkpoints/step_3", None, []).model.path == str(step_3)
    monkeypatch.chdir(run / "checkpoints")
    assert engine_settings("step_3").model == str(step_3) and run_folder("step_3") == run


def test_a_runs_result_is_used_until_the_run_has_continued(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_3", run / "model")
    (run / "model" / "config.json").write_text("{}")
    assert model_folder(str(run)) == run / "model"
    os.utime(run / "model" / "config.json", (1, 1))
    assert model_folder(str(run)) == run / "model_step_10"
    assert model_folder(str(run), 3) == run / "model_step_3"


def test_an_export_is_written_once_and_anew_for_another_checkpoint_of_the_step(
    run: Path, tiny_qwen2: Path
) -> None:
    weights = model_folder(str(run)) / "model.safetensors"
    before, number = weights.read_bytes(), weights.stat().st_ino
    assert model_folder(str(run)) == weights.parent and weights.stat().st_ino == number
    (run / "model_step_10.tmp").mkdir()  # as a kill leaves it
    (run / "model_step_10.tmp" / "model.part0.safetensors").touch()
    trained(recipe(run.parent, tiny_qwen2), [10])  # the run has started over
    assert model_folder(str(run)) == weights.parent and weights.read_bytes() != before
    assert not (run / "model_step_10.tmp").exists()


def test_an_export_leaves_no_thread_that_a_fork_would_lose(run: Path) -> None:
    """The engine starts in a fork of this process, in which a wait for such a thread would never end."""
    script = (
        "import os, sys\nfrom trainer.commands.generate import model_folder\n"
        "def threads():\n    return len(os.listdir('/proc/self/task'))\n"
        "if __name__ == '__main__':\n    before = threads()\n"
        "    model_folder(sys.argv[1])\n    print(max(0, threads() - before))\n"
    )
    (run.parent / "script.py").write_text(script)
    command = [sys.executable, str(run.parent / "script.py"), str(run)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "0\n" and (run / "model_step_10" / "COMPLETE").is_file(), done.stderr


def test_an_export_that_fails_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = next((run / "checkpoints" / "step_10").glob("*.distcp"))
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)
    shutil.copytree(run / "checkpoints" / "step_3", run.parent / "elsewhere" / "step_3")
    cases = {
        ("generate", str(run)): "step_10 is damaged: __0_0.distcp is not what was written",
        (
            "serve",
            str(run),
            "--step",
            "7",
        ): "step_7 is not a complete checkpoint: choose another one in its folder",
        ("eval", f"{run.parent}/elsewhere/step_3", f"{run}/config.yaml"): "is not in a run's folder",
        ("generate", str(run.parent), "--step", "7"): "is not in a run's folder",
    }
    for words, expected in cases.items():
        assert main(words) == 2
        message = capsys.readouterr().err
        assert (
            expected in message and "Traceback" not in message and not (run / "model_step_10").exists()
        )
    assert load_config(run / "config.yaml", []).run.name == "mine"
