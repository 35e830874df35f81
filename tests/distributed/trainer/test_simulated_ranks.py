"""Compare `hotbunk plan` for many ranks with what one of them does, alone, on tensors without data."""

import json
import os
import subprocess

from tests.conftest import ROOT
from tests.support.forked import PYTHON

CASES = [
    "7b,8,4",
    "7b,1,2",
    "1.5b,512,3",
    "7b,64,3,none,8192",
    "32b,512,2,every_second",
    "7b,8,3,none,32768,4",
]
CASES += ["Qwen/Qwen3-30B-A3B,8,4"]
"""Models of full width with few layers, since memory grows by equal layers; the script has models of full depth."""


def test_the_plans_memory_and_collectives_are_those_of_an_update() -> None:
    command = [*PYTHON, str(ROOT / "tests/support/simulated_ranks.py"), "traffic", "512", *CASES]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["spec"] for row in rows] == CASES
    far = [row for row in rows if abs(row["planned"] / row["tracked"] - 1) > 0.1]
    assert not far, done.stderr[-4000:]
