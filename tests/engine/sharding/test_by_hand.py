"""The loop that docs/engines.md puts together by hand, with a tiny model."""

import os
import re
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.forked import ENGINES, PYTHON

NUMBER = r"[\d.e+-]+"


def test_parts_put_together_by_hand_train_and_agree(tiny_qwen2: Path, tmp_path: Path) -> None:
    """Each step's answers are sampled by the policy that scores them."""
    page = (ROOT / "docs" / "engines.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ShardingManager(" in code)
    (tmp_path / "runs" / "arithmetic").mkdir(parents=True)
    (tmp_path / "runs" / "arithmetic" / "model").symlink_to(tiny_qwen2)
    (tmp_path / "by_hand.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), ENGINES: "1"}
    command = [*PYTHON, str(tmp_path / "by_hand.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    steps = re.findall(rf"^(\d) (\d) .*'loss': ({NUMBER}), 'gap': ({NUMBER})", done.stdout, re.MULTILINE)
    assert [(step, version) for step, version, _, _ in steps] == [("0", "0"), ("1", "1"), ("2", "2")], done.stdout
    assert all(float(gap) < 1e-4 for *_, gap in steps) and any(float(loss) for _, _, loss, _ in steps)
