"""A run that was started by torchrun itself, or by `accelerate launch`, without the script: it trains."""

import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

import yaml

from scripts.arithmetic import write_arithmetic
from tests.conftest import ROOT, TinyModel
from tests.forked import PYTHON


def environment(folder: Path) -> dict[str, str]:
    """Of torchrun, which starts ranks by the one program that this names, here forked ones."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    python.chmod(0o755)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)}


def test_a_bare_torchrun_says_what_is_open_and_a_run_whose_folder_is_deleted_ends(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    write_arithmetic(tmp_path / "data", sft_size=64)
    recipe = {
        "run": {"output_dir": str(tmp_path), "name": "run", "device": "cpu"},
        "model": {"path": str(tiny_model())},
        "data": {"path": str(tmp_path / "data" / "sft.jsonl")},
        "policy": {"dtype": "float32"},
        "sft": {"steps": 1_000_000, "batch_size": 8, "completion_key": "completion"},
        "tracking": {"wandb": "disabled"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    torchrun = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*torchrun, "-m", "trainer", "sft", str(tmp_path / "recipe.yaml")]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment(tmp_path))
    try:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        shutil.rmtree(tmp_path / "run")
        assert run.wait(60) != 0
    finally:
        run.kill()
    said = (tmp_path / "log").read_text()
    assert "where the ranks meet, is open to the network" in said
    assert f"hotbunk: {tmp_path}/run was deleted, moved or replaced while the run was writing to it" in said
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_starts_two_ranks_with_the_file_that_the_policy_takes_its_keys_from(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    write_arithmetic(tmp_path / "data", sft_size=64)
    fsdp = {"fsdp_version": 2, "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    file = tmp_path / "accelerate.yaml"
    processes = {"num_machines": 1, "num_processes": 2, "machine_rank": 0, "use_cpu": True}
    file.write_text(
        yaml.safe_dump({"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": fsdp, **processes})
    )
    recipe = {
        "run": {"output_dir": str(tmp_path), "name": "run", "device": "cpu"},
        "model": {"path": str(tiny_model())},
        "data": {"path": str(tmp_path / "data" / "sft.jsonl")},
        "policy": {"accelerate_config": str(file)},
        "sft": {"steps": 2, "batch_size": 8, "completion_key": "completion"},
        "tracking": {"wandb": "disabled"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", str(port)]
    run = subprocess.run(
        [*PYTHON, *launch, "-m", "trainer", "sft", str(tmp_path / "recipe.yaml")],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    policy = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["policy"]
    assert (policy["dtype"], policy["activation_checkpointing"]) == ("float32", "full")
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "rank_1.json").is_file()
