"""Runs that torchrun itself or `accelerate launch` starts, without our script."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.examples.tasks.arithmetic import write_arithmetic
from tests.conftest import ROOT, TinyModel
from tests.support.forked import PYTHON
from tests.support.real_run import write_recipe
from tests.support.rows import read_rows
from tests.support.wandb_files import wandb_records


def environment(folder: Path) -> dict[str, str]:
    """Environment variables for a torchrun whose ranks are forked by the program that PYTHON_EXEC names."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    python.chmod(0o755)
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)}


def test_a_bare_torchrun_warns_of_its_open_port_and_ends_without_its_folder(
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
    output = (tmp_path / "log").read_text()
    assert "where the ranks meet, is open to the network" in output
    assert (
        f"hotbunk: {tmp_path}/run was deleted, moved or replaced while the run was writing to it"
        in output
    )
    assert not (tmp_path / "run").exists()


def trained(recipe: Path, launch: list[str], environment: dict[str, str]) -> Path:
    """Launches ranks in this way; returns the folder of the finished run, whose engines had the policy's weights."""
    run = subprocess.run(
        [*PYTHON, *launch, "-m", "trainer", "train", str(recipe)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.parent / "runs" / "recipe"
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) == 2 and max(row["gap/max"] for row in rows) <= 1e-4
    assert json.loads((folder / "summary.json").read_text())["syncs_verified"] == 2
    assert (folder / "checkpoints" / "step_2" / "rank_1.json").is_file()
    return folder


def test_accelerate_launch_trains_two_ranks_by_accelerates_own_file(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    fsdp = {
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    file = tmp_path / "accelerate.yaml"
    processes = {"num_machines": 1, "num_processes": 2, "machine_rank": 0, "use_cpu": True}
    file.write_text(
        yaml.safe_dump(
            {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": fsdp, **processes}
        )
    )
    sections = {"run": {"steps": 2, "device": "cpu"}, "policy": {"accelerate_config": str(file)}}
    recipe = write_recipe(tmp_path, tiny_model(), **sections)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        "--main_process_port",
        str(port),
    ]
    folder = trained(recipe, launch, environment(tmp_path))
    policy = yaml.safe_load((folder / "config.yaml").read_text())["policy"]
    assert (policy["dtype"], policy["activation_checkpointing"]) == ("float32", "full")


def test_a_bare_torchrun_trains_two_ranks_by_zero_3(tiny_model: TinyModel, tmp_path: Path) -> None:
    zero_3 = {"backend": "deepspeed", "zero_stage": 3}
    recipe = write_recipe(tmp_path, tiny_model(), run={"steps": 2, "device": "cpu"}, policy=zero_3)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    trained(recipe, torchrun, environment(tmp_path))


def test_a_run_by_zero_2_writes_everything_to_wandbs_offline_files(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    zero_2 = {"backend": "deepspeed", "zero_stage": 2}
    sections = {"run": {"steps": 2, "device": "cpu"}, "policy": zero_2, "tracking": {"wandb": "offline"}}
    recipe = write_recipe(tmp_path, tiny_model(), **sections)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = trained(recipe, torchrun, environment(tmp_path) | {"WANDB_MODE": "offline"})

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, history = dict[str, Any](), list[dict[str, Any]]()
    for record in wandb_records(file):
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            history.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            )
    assert config["policy"]["zero_stage"] == 2 and config["run"]["steps"] == 2
    rows = read_rows(folder / "metrics.jsonl")
    figures = {int(row["train/step"]): row["reward/mean"] for row in history if "reward/mean" in row}
    assert figures == {row["train/step"]: pytest.approx(row["reward/mean"]) for row in rows}
    tables = [
        json.loads(table.read_text()) for table in file.parent.glob("files/media/table/*.table.json")
    ]
    answers = read_rows(folder / "completions.jsonl")
    texts = {str(cell) for table in tables for row in table["data"] for cell in row}
    assert answers and {answer["text"] for answer in answers} <= texts
