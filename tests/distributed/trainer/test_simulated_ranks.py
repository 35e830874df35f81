"""What `hotbunk plan` says of many ranks against what one of them does, on tensors without data and alone."""

import json
import os
import subprocess

from tests.conftest import ROOT
from tests.support.forked import PYTHON

CASES = ["7b,8,4", "7b,1,2", "1.5b,512,3", "7b,64,3,none,8192", "32b,512,2,every_second", "7b,8,3,none,32768,4"]
"""The models' widths with few layers: whatever grows with them is tracked layer by layer. The script has whole ones."""


def test_planned_memory_is_tracked_memory_and_planned_collectives_are_called_ones() -> None:
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
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["spec"] for row in found] == CASES
    far = [row for row in found if abs(row["planned"] / row["tracked"] - 1) > 0.1]
    assert not far, done.stderr[-4000:]
