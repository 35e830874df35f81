"""A training that was killed by SIGKILL continues from its last save as one that was not disturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbunk import Training
from tests.conftest import ROOT
from tests.support.forked import PYTHON
from tests.support.training_checks import assert_equal, make, random_data, squared, weights_of
from trainer.policy import FsdpPolicy
from trainer.run import checkpoint
from trainer.training.losses import NamedLoss

STEPS = 5
SAVED = 2  # steps before the save that is loaded

INNER: dict[str, tuple[Any, str, int]] = {
    "forward_backward": (NamedLoss, "__call__", 2),  # with the gradients of one micro-batch
    "logprobs": (FsdpPolicy, "score", 1),
    "optim_step": (FsdpPolicy, "step", 1),
    "save": (checkpoint, "_digest_line", 2),  # with files that are not published yet
    "load": (checkpoint, "load", 1),
    "export": (FsdpPolicy, "save_pretrained", 1),
}
"""What a call runs inside, and how many times until the process is killed, after that has run."""


def steps(training: Training, last: int) -> None:
    """Train until this step, with data and losses that depend on its number."""
    while training.version < last:
        data = random_data(12, seed=training.version)
        training.forward_backward(data, "ppo")
        training.forward_backward(data[:4], squared)
        training.optim_step(1e-2)


def be_killed(model: Path, folder: Path, name: str) -> None:
    """Train and save twice, and then die within the call of this name."""
    with make(model) as training:
        for step in range(1, SAVED + 1):
            steps(training, step)
            training.save(folder)
        steps(training, SAVED + 1)  # lost
        data = random_data(12, seed=9)
        if name == "optim_step":
            training.forward_backward(data)
        die_within(name)
        calls = {
            "forward_backward": lambda: training.forward_backward(data),
            "logprobs": lambda: training.logprobs(data),
            "optim_step": training.optim_step,
            "save": lambda: training.save(folder),
            "load": lambda: training.load(folder),
            "export": lambda: training.export(folder / "model"),
        }
        calls[name]()


def die_within(name: str) -> None:
    """Have this process killed in the middle of the next call of this name."""
    owner, attribute, left = INNER[name]
    original = getattr(owner, attribute)

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        result = original(*arguments, **options)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, deadly)


@pytest.fixture(scope="module")
def undisturbed(tiny_qwen3: Path) -> dict[str, Tensor]:
    """The weights after all steps without a save, a load or a kill."""
    with make(tiny_qwen3) as training:
        steps(training, STEPS)
        return weights_of(training)


@pytest.mark.parametrize("name", INNER)
def test_after_a_kill_in_any_call_the_last_save_continues_bit_for_bit(
    name: str, tiny_qwen3: Path, tmp_path: Path, undisturbed: dict[str, Tensor]
) -> None:
    command = [*PYTHON, __file__, str(tiny_qwen3), str(tmp_path), name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    remains = {path.name for path in tmp_path.iterdir()} - {"model"}
    files_written = {"step_3.tmp"} if name == "save" else set()
    assert remains == {"step_1", "step_2"} | files_written
    with make(tiny_qwen3) as training:
        assert training.load(tmp_path) == tmp_path / f"step_{SAVED}"
        for step in range(SAVED + 1, STEPS + 1):
            steps(training, step)
            training.save(tmp_path)
        assert_equal(weights_of(training), undisturbed)
    assert checkpoint.latest_complete(tmp_path) == tmp_path / f"step_{STEPS}"
    assert not [*tmp_path.glob("*.tmp")]


if __name__ == "__main__":
    torch.set_num_threads(1)
    be_killed(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
