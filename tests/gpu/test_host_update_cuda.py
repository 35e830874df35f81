"""Steps that the CPU takes for a GPU's policy (`policy.update_on: host`), beside the GPU's own. Skipped without a GPU.

They have run on the GPU in software (tests/softgpu), and on no real one yet.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import host_update_checks as checks
from tests.support import policy_checks
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


@pytest.mark.parametrize("case", ["bfloat16", "in place"])
def test_weights_gradients_and_optimizer_state_stay_in_host_memory(gpu: None, models: Path, case: str) -> None:
    model = checks.make(models, "host", case)
    checks.step(model)
    held = [*model.trained().values(), *checks.state(model).values()]
    assert held and all(tensor.device.type == "cpu" for tensor in held)
