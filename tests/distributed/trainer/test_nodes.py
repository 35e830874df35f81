"""Train on two machines, which are namespaces on this one; `nodes_run.py` has more machines and events."""

from pathlib import Path

import pytest

from tests.support import nodes_run
from tests.support.nodes import missing


def test_a_link_that_is_down_for_5_s_changes_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if why := missing():
        pytest.skip(f"this machine cannot simulate several: {why}")
    ended = nodes_run.main([str(tmp_path / "nodes"), "--nodes", "2", "--only", "cut"])
    output = capsys.readouterr().out
    assert ended == 0 and "equal, bit for bit: 4 steps on 2 nodes" in output, output
    assert "failed in step" not in output  # no attempt has failed
