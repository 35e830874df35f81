"""A run on two machines, which are namespaces on this one. `nodes_run.py` does more to more of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.real_run import ROOT
from tests.nodes import missing


def test_a_link_that_is_cut_for_5_s_changes_nothing(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"this machine cannot play several: {why}")
    command = [sys.executable, str(ROOT / "tests/distributed/nodes_run.py"), str(tmp_path / "nodes")]
    ran = subprocess.run([*command, "--nodes", "2", "--only", "cut"], capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0 and "equal, bit for bit: 4 steps on 2 nodes" in ran.stdout, ran.stdout + ran.stderr
    assert "failed in step" not in ran.stdout  # nothing was started again
