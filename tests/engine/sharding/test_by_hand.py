"""Run the programs of docs/engines.md with a tiny model."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.support.colocated import HfPolicy
from tests.support.forked import ENGINES, PYTHON

TRAINED = "[parameter.data.mul_(1 + 0.5 * step) for _, parameter in actor.named_parameters()]"


def code_with(call: str) -> str:
    """Return the page's program that contains this call."""
    page = (ROOT / "docs" / "engines.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in code)
    return code


def printed_by(code: str, model: Path, folder: Path) -> str:
    """Run a program beside a run's folder with this model; return what it prints."""
    (folder / "runs" / "arithmetic").mkdir(parents=True)
    (folder / "runs" / "arithmetic" / "model").symlink_to(model)
    (folder / "by_hand.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), ENGINES: "1"}
    command = [*PYTHON, str(folder / "by_hand.py")]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", ["update_weights_via_ipc_zmq(", "update_weights_from_collective("])
def test_a_policy_updates_nemo_rls_engines(call: str, tiny_qwen2: Path, tmp_path: Path) -> None:
    """Weights change where the page says `train here`; plain Transformers with the same changes answers the same."""
    code = code_with(call)
    assert code.count("\n") < 45
    code, changes = re.subn(r"# train here.*", TRAINED, code)
    printed = printed_by(code, tiny_qwen2, tmp_path)
    answers = re.findall(r"^(\d) (\[\[.*?\]\]) (\[\[.*?\]\])$", printed, re.MULTILINE)
    assert changes == 1 and [step for step, *_ in answers] == ["0", "1", "2"], printed
    expected = HfPolicy(tiny_qwen2)
    for step, ids, logprobs in ((int(step), *map(json.loads, lists)) for step, *lists in answers):
        with torch.no_grad():
            for parameter in expected.model.parameters():
                parameter.mul_(1 + 0.5 * step)
        assert torch.tensor(logprobs[0][3:]).allclose(
            torch.tensor(expected.logprobs(ids[0])[2:]), atol=1e-4
        ), printed
    assert len({logprobs for *_, logprobs in answers}) > 1
