"""Steps that the CPU takes for a GPU's policy (`policy.update_on: host`), beside the GPU's own. Skipped without a GPU.

They have run on the GPU in software (tests/softgpu), and on no real one yet.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import host_update_checks as checks
from tests.support import policy_checks
from trainer.commands.tiny_model import make_tiny_model
from trainer.distributed import destroy_process_group, init_process_group

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Policies and batches on the GPU, and a process group for it."""
    monkeypatch.setattr(policy_checks, "CPU", torch.device("cuda", 0))
    init_process_group(300, "cuda")
    yield
    destroy_process_group()


@pytest.mark.parametrize("case", [case for case in checks.CASES if case != "replicas"])
def test_steps_on_the_host_are_those_of_the_gpu(gpu: None, models: Path, case: str) -> None:
    checks.check_host_update(models, case, tolerance=1e-3)


def test_activations_in_host_memory_change_no_step_and_free_the_device(
    gpu: None, tmp_path: Path
) -> None:
    layers, hidden, length = 8, 256, 1024
    make_tiny_model(policy_checks.model_folder(tmp_path), hidden_size=hidden, layers=layers)
    states, peaks = [], []
    for offload in (False, True):
        model = checks.make(tmp_path, "device", "recomputed", offload_activations=offload)
        checks.step(model, lengths=[length, length])
        torch.cuda.reset_peak_memory_stats()
        checks.step(model, lengths=[length, length])
        peaks.append(torch.cuda.max_memory_allocated())
        states.append({name: tensor.cpu() for name, tensor in checks.state(model).items()})
        del model
        gc.collect()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    inputs = layers * length * hidden * 2
    assert 0.7 * inputs < peaks[0] - peaks[1] < 1.1 * inputs


@pytest.mark.parametrize("case", ["bfloat16", "in place"])
def test_weights_gradients_and_optimizer_state_stay_in_host_memory(
    gpu: None, models: Path, case: str
) -> None:
    model = checks.make(models, "host", case)
    checks.step(model)
    held = [*model.trained().values(), *checks.state(model).values()]
    assert held and all(tensor.device.type == "cpu" for tensor in held)
