"""scripts/examples/accelerate_loop.py, a loop written with Accelerate, samples, sleeps, trains and syncs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.forked import ENGINES, PYTHON

LINE = re.compile(r"^step (\d) version (\d) reward [\d.]+ gap ([\d.e+-]+) verified (\w+)$", re.MULTILINE)
ZERO_2 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "DS_ACCELERATOR": "cpu",
}


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(1, {}), (2, {}), (2, ZERO_2)],
    ids=["alone", "two ranks by DDP", "two ranks by DeepSpeed"],
)
def test_engines_sample_with_the_weights_that_accelerate_trains(
    tiny_qwen2: Path, tmp_path: Path, ranks: int, kind: dict[str, str]
) -> None:
    """Both ranks begin with the same weights, and each engine has its model's log-probabilities after every step."""
    python = tmp_path / "python"  # torchrun starts ranks with it; here they are forked
    python.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        ENGINES: "1",
        "ACCELERATE_USE_CPU": "true",
        **kind,
    }
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    done = subprocess.run(
        [*PYTHON, *torchrun, str(ROOT / "scripts" / "examples" / "accelerate_loop.py"), str(tiny_qwen2)],
        cwd=tmp_path,
        env=environment | {"PYTHON_EXEC": str(python)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = LINE.findall(done.stdout)
    assert [line[:2] for line in lines] == [("0", "1"), ("1", "2"), ("2", "3")], done.stdout
    assert all(float(gap) < 1e-4 and verified == "full" for *_, gap, verified in lines), done.stdout


def test_the_printed_command_says_why_it_starts_one_process_on_a_cpu(tmp_path: Path) -> None:
    command = "-m accelerate.commands.launch --num_processes 2 scripts/examples/accelerate_loop.py MODEL"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert (
        "accelerate launch starts one process, whatever --num_processes says: use torchrun"
        in done.stderr
    )
