"""Simulated ranks count the same operations as real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import scale_run

from tests.conftest import ROOT
from tests.support.forked import PYTHON
from tests.support.launch import run_ranks

COUNTED = ("ranks", "start", "step", "requests", "files")


def really(folder: str, output: str) -> None:
    """Run the benchmark's function on a real rank."""
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import scale_run

    scale_run.really(folder, output)


def test_real_ranks_send_receive_and_save_as_much_as_simulated_ones(tmp_path: Path) -> None:
    scale_run.make_inputs(tmp_path)
    (tmp_path / "apart").mkdir()
    scale_run.make_inputs(tmp_path / "apart")
    script = str(ROOT / "scripts/bench/scale.py")
    simulated = [
        *PYTHON,
        script,
        "--simulated",
        str(tmp_path / "apart"),
        "1,2,4",
        str(tmp_path / "simulated"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        simulated, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {report["ranks"]: report for report in json.loads((tmp_path / "simulated").read_text())}
    for ranks in (1, 2, 4):
        run_ranks(really, ranks, arguments=[str(tmp_path), str(tmp_path / f"{ranks}.json")])
        report = json.loads((tmp_path / f"{ranks}.json").read_text())
        for key in COUNTED:
            assert report[key] == expected[ranks][key], f"{key} of {ranks} ranks"
