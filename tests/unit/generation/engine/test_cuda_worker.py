"""The worker on CUDA where it needs no GPU: sleep beside a process that takes memory meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation.engine.cuda_worker import INCREASED, CudaWorker

TOTAL = 1000


class Backend:
    """A sleeping pool of 70 bytes, on a device where a neighbour takes some as well."""

    def __init__(self, neighbour: int, error: Exception | None = None) -> None:
        self.free = 500
        self.neighbour = neighbour
        self.error = error
        self.levels: list[int] = []

    def suspend(self, level: int) -> None:
        if self.error is not None:
            raise self.error
        self.levels.append(level)
        self.free += 70 - self.neighbour


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker that has not started; a test gives it a backend."""
    monkeypatch.setattr(CudaWorker, "sleep_mode_backend", None)
    worker: Any = CudaWorker.__new__(CudaWorker)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda: (worker.sleep_mode_backend.free, TOTAL)
    )
    return worker


@pytest.mark.parametrize("neighbour", [0, 70, 71, 500])
def test_a_neighbour_that_takes_memory_during_a_sleep_does_not_end_the_engine(
    worker: Any, neighbour: int
) -> None:
    worker.sleep_mode_backend = Backend(neighbour)
    worker.sleep(1)
    assert worker.sleep_mode_backend.levels == [1]


def test_vllm_still_has_the_assertion_that_is_passed_over(worker: Any) -> None:
    worker.sleep_mode_backend = Backend(71)
    with pytest.raises(AssertionError, match=INCREASED):
        super(CudaWorker, worker).sleep(1)


def test_any_other_assertion_of_a_sleep_is_raised(worker: Any) -> None:
    worker.sleep_mode_backend = Backend(0, AssertionError("a tag is missing"))
    with pytest.raises(AssertionError, match="a tag is missing"):
        worker.sleep(1)
