"""`hotbunk train` and `hotbunk sft` in processes whose Python is a stub that prints its arguments."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.polling import wait_until
from tests.unit.test_scripts import write_stub

PROGRAM = """
import sys
sys.executable = sys.argv.pop(1)
from hotbunk.__main__ import main
sys.exit(main())
"""
SEVERAL = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "first", "NPROC_PER_NODE": "8"}


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder / "python"), *arguments]


def variables(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder / "bin"), "HOME": str(folder), "PYTHONPATH": str(ROOT)}


def hotbunk(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with no variables except these."""
    return subprocess.run(
        command(folder, *arguments),
        cwd=folder,
        env=variables(folder) | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., list[str]]:
    """Run the command; give what it becomes: a line an argument, then two variables.

    The check of the recipe, which comes first, passes unless CHECK_FAILS is set.
    """
    says = '[ "$PYTHONSAFEPATH" = 1 ] || exit 3; printf "%s\\n" "$@" "OMP=$OMP_NUM_THREADS" "WORLD=$WORLD_SIZE"'
    checks = 'printf "%s of %s\\n" "$LOCAL_WORLD_SIZE" "$WORLD_SIZE" >ranks; exit ${CHECK_FAILS:-0}'
    write_stub(tmp_path / "python", f'case "$*" in *--check) {checks} ;; *) {says} ;; esac')

    def launch(*arguments: str, **environment: str) -> list[str]:
        done = hotbunk(tmp_path, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return launch


def test_the_command_starts_the_launcher_of_one_node(launched: Callable[..., list[str]]) -> None:
    words = launched("train", "my recipe.yaml", "--run.name", "a b", NPROC_PER_NODE="2")
    assert words[:4] == ["-m", "trainer.launcher", "--nproc-per-node", "2"]
    assert words[4:-2] == ["-m", "trainer", "train", "my recipe.yaml", "--run.name", "a b"]
    assert words[-2:] == [f"OMP={max(1, len(os.sched_getaffinity(0)) // 2)}", "WORLD="]
    assert launched("train", "r.yaml")[3] == "1"
    assert launched("sft", "r.yaml", OMP_NUM_THREADS="5")[4:-1] == [
        "-m",
        "trainer",
        "sft",
        "r.yaml",
        "OMP=5",
    ]


def test_the_command_starts_one_rank_a_visible_gpu(
    tmp_path: Path, launched: Callable[..., list[str]]
) -> None:
    write_stub(
        tmp_path / "bin" / "nvidia-smi", "echo 'GPU 0: H200'; echo 'GPU 1: H200'; echo 'GPU 2: H200'"
    )
    assert launched("train", "r.yaml")[3] == "3"
    assert launched("train", "r.yaml", CUDA_VISIBLE_DEVICES="2,0")[3] == "2"
    assert launched("train", "r.yaml", CUDA_VISIBLE_DEVICES="")[3] == "1"


def test_the_command_joins_the_other_nodes(tmp_path: Path, launched: Callable[..., list[str]]) -> None:
    words = " ".join(launched("train", "r.yaml", **SEVERAL))
    assert "--nnodes 4 --node-rank 3 --master-addr first --master-port 29500 --nproc-per-node 8" in words
    assert (tmp_path / "ranks").read_text() == "8 of 32\n"
    refused = hotbunk(tmp_path, "train", "r.yaml", NNODES="4", NODE_RANK="1")
    assert refused.returncode == 2
    assert "MASTER_ADDR" in refused.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, value)
            for name in ("NPROC_PER_NODE", "NNODES")
            for value in ("abc", "0", "-1", "1.5", "08")
        ],
        ("NNODES", "9" * 99),
        ("RESTARTS", "many"),
        ("NODE_RANK", "4"),
        ("NODE_RANK", "x[$(date)]"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_the_command_refuses_invalid_numbers(tmp_path: Path, name: str, value: str) -> None:
    refused = hotbunk(tmp_path, "train", "r.yaml", **SEVERAL | {name: value})
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"hotbunk: {name} is '{value[:40]}") and len(refused.stderr) < 300
    assert refused.stderr.count("\n") == 1


def test_the_command_restarts_a_run_only_if_restarts_is_set(launched: Callable[..., list[str]]) -> None:
    assert launched("train", "r.yaml", RESTARTS="0")[:2] == ["-m", "trainer.launcher"]
    assert launched("train", "r.yaml", RESTARTS="7")[:3] == ["-m", "trainer.run.supervisor", "7"]


def test_the_command_starts_nothing_if_the_recipe_has_a_mistake(
    tmp_path: Path, launched: Callable[..., list[str]]
) -> None:
    assert launched("train", "r.yaml")
    refused = hotbunk(tmp_path, "train", "r.yaml", CHECK_FAILS="2")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_it_alone_is_sent_ends_the_check_and_starts_nothing(
    tmp_path: Path, number: int
) -> None:
    pid = tmp_path / "pid"
    checks = f"*--check) echo $$ >{pid}; exec /bin/sleep 60 ;;"
    write_stub(tmp_path / "python", f'case "$*" in {checks} esac; echo on')
    heeded = partial(signal.signal, number, signal.SIG_DFL)  # nohup's SIGHUP would rightly be ignored
    words, environment = command(tmp_path, "train", "r.yaml"), variables(tmp_path)
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=-1, preexec_fn=heeded) as train:
        wait_until(lambda: pid.exists() and pid.read_text().strip())
        check = psutil.Process(int(pid.read_text()))
        train.send_signal(number)
        assert train.communicate(timeout=120) == (b"", None)
    assert train.returncode == 128 + number
    # Whoever it is left to may not have waited for it yet
    assert not psutil.wait_procs([check], timeout=60)[1]


def test_help_and_refusals_need_no_ranks(tmp_path: Path, launched: Callable[..., list[str]]) -> None:
    """The command knows the number of future ranks, so that batches are checked against it."""
    (tmp_path / "data.jsonl").write_text("{}")
    (tmp_path / "r.yaml").write_text(
        "model: {path: /absent}\ndata: {path: data.jsonl}\nbatch: {prompts_per_step: 2}\n"
    )
    refused = hotbunk(tmp_path, "train", "r.yaml", "--dry-run", NPROC_PER_NODE="3")
    assert refused.returncode == 2 and "the number of ranks (3)" in refused.stderr
    assert launched("sft", "--help")[0].startswith("usage: hotbunk sft")


def test_a_process_that_torchrun_has_started_is_a_rank(tmp_path: Path) -> None:
    refused = hotbunk(tmp_path, "train", "r.yaml", TORCHELASTIC_RUN_ID="none")
    assert (refused.returncode, refused.stderr) == (2, "hotbunk: r.yaml: no such recipe file\n")
