"""Whole shifts over a fake of vLLM's sleeping allocator, which fills with NaN whatever is not saved.

Real are the sharding manager, the worker extension, the engine's states, and the code by which vLLM's CUDA worker
falls asleep and wakes; made up are the model, of a few weights, and the memory.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.worker.gpu_worker import Worker as CudaWorker

from generation.engine import cuda_worker
from generation.engine.engine import Engine, Leader
from generation.engine.lifecycle import EngineStateError
from generation.engine.settings import EngineSettings
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource
from sharding.worker import extension
from sharding.worker.recording import Recording
from tests.support.in_process import SmallModel, Thread, Worker, small_weights


class Allocator(TorchDispatchMode):
    """CuMemAllocator's tags and what its `sleep` and `wake_up` do to memory; inside, use of what sleeps is an error."""

    def __init__(self, pools: dict[str, list[Tensor]], events: list[str]) -> None:
        super().__init__()
        self._pools, self._events = pools, events
        self._asleep: dict[str, list[Tensor] | None] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tag in self._asleep:
            if used & {tensor.untyped_storage()._cdata for tensor in self._pools[tag]}:
                raise RuntimeError(f"an illegal memory access: {function} of {tag}, which are asleep")
        return function(*args, **(kwargs or {}))

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self._events.append(
            f"engine sleeps, saving {[tag for tag in offload_tags if tag in self._pools]}"
        )
        for tag, tensors in self._pools.items():
            saved = [tensor.clone() for tensor in tensors] if tag in offload_tags else None
            for tensor in tensors:
                tensor.fill_(torch.nan)
            self._asleep[tag] = saved

    def wake_up(self, tags: list[str]) -> None:
        self._events.append(f"engine maps {tags}")
        for tag in tags:
            for tensor, saved in zip(self._pools[tag], self._asleep.pop(tag) or [], strict=False):
                tensor.copy_(saved)


class SleepingModel(SmallModel):
    """A model with a padded vocabulary, a buffer, and a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = nn.Parameter(torch.zeros(10, 6))
        self.register_buffer("frequencies", torch.tensor([0.5, 2.0]), persistent=False)
        self.cache = torch.zeros(4, 6)

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "vocabulary":
                self.vocabulary.data[: len(weight)].copy_(weight)
                self.vocabulary.data[len(weight) :].fill_(0)
            else:
                super().load_weights([(name, weight)])

    @torch.no_grad()
    def generate(self) -> Tensor:
        """Return a sum over every weight, the padding, the buffer, and the cache after it was written."""
        self.cache.copy_(self.rows[:4])
        sums = [self.cache, self.rows, self.columns, self.norm, self.scaled, self.vocabulary]
        return torch.stack([partial.sum() for partial in sums]).outer(self.frequencies)


def expected(weights: dict[str, Tensor]) -> Tensor:
    """Return the result of `generate` with these weights."""
    a, b, columns, norm, scaled, vocabulary = (weights[name].sum() for name in sorted(weights))
    assert sorted(weights)[2:] == ["columns", "norm", "scaled", "vocabulary"]
    sums = [weights["a"][:4].sum(), a + b, columns, norm, 2 * scaled, vocabulary]
    return torch.stack(sums).outer(torch.tensor([0.5, 2.0]))


class SleepingWorker(Worker):
    """A worker that sleeps as vLLM's on CUDA does."""

    sleep, wake_up = CudaWorker.sleep, CudaWorker.wake_up
    _save_sleep_parameters, get_draft_model = CudaWorker._save_sleep_parameters, lambda _: None
    synchronize_device = lambda _: None  # noqa: E731

    def __init__(self, model: SleepingModel) -> None:
        config = SimpleNamespace(
            dtype=torch.float32, sleep_preserve_parameter_names=(), enable_nccl_comm_suspend=False
        )
        ranks = SimpleNamespace(tensor_parallel_size=1)
        super().__init__(model, SimpleNamespace(model_config=config, parallel_config=ranks))
        self.model_config, self.model_runner = config, SimpleNamespace(model=model)
        self.sleep_mode_backend = CuMemBackend()
        self._sleep_saved_buffers: dict[str, Tensor] = {}
        self._sleep_saved_parameters: dict[str, Tensor] = {}
        self._sleep_saved_draft_buffers: dict[str, Tensor] = {}


class SleepingLLM:
    """An AsyncLLM with one worker."""

    errored = False

    def __init__(self, worker: SleepingWorker, allocator: Allocator) -> None:
        self.worker, self.allocator = worker, allocator

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        with self.allocator:
            return [getattr(self.worker, method)(*args)]

    async def sleep(self, level: int) -> None:
        await self.collective_rpc("sleep", args=(level,))

    async def wake_up(self, tags: list[str]) -> None:
        await self.collective_rpc("wake_up", args=(tags,))

    async def reset_prefix_cache(self) -> bool:
        return True


class Policy:
    """A policy whose memory is gone while the engine has it."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.version = events, 0
        self.weights = small_weights(0) | {"vocabulary": torch.randn(7, 6)}

    def train(self) -> None:
        self.version += 1
        for weight in self.weights.values():
            weight.add_(torch.randn(weight.shape))

    def release(self, weights: bool) -> int:
        self.events.append(f"policy releases {'all' if weights else 'its state'}")
        return 1

    def restore(self) -> None:
        self.events.append("policy restores")

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        raise AssertionError("weights are compared")


class Shifts:
    """A manager, its engine and a policy, started, with the engine asleep."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.model, self.policy = SleepingModel(), Policy(self.events)
        parameters = [parameter.data for parameter in self.model.parameters()]
        # vLLM builds the model inside the pool, buffers and all.
        pools = {"weights": [*parameters, self.model.frequencies], "kv_cache": [self.model.cache]}
        self.allocator = Allocator(pools, self.events)
        monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self.allocator)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30, 2 << 30))
        monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)
        self.engine = Engine(EngineSettings("none", 64, device_indices=(0,)))
        self.engine._llm = SleepingLLM(SleepingWorker(self.model), self.allocator)  # type: ignore[assignment]
        self.thread = Thread()
        self.manager = ShardingManager(
            FsdpWeightSource(list(self.policy.weights.items()), torch.float32),
            torch.device("cpu"),
            SyncSettings(verify="full", timeout=20),
            folder,
            leader=Leader(self.engine, self.thread),  # type: ignore[arg-type]
        )
        self.manager.connect()
        self.manager.sleep()
        self.events.clear()

    def generate(self) -> Tensor:
        self.events.append("rollouts")
        self.engine.state.check_can_generate(self.policy.version)
        with self.allocator:
            return self.model.generate()

    def shift(self) -> None:
        """Run a generation shift after a training step, and check that it generates with the policy's weights."""
        self.policy.train()
        with self.manager.generation_shift(self.policy):
            output = self.generate()
        torch.testing.assert_close(output, expected(self.policy.weights))


@pytest.fixture
def shifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    shifts = Shifts(tmp_path, monkeypatch)
    yield shifts
    shifts.manager.close()


def test_no_shift_uses_memory_that_sleep_has_dropped(shifts: Shifts) -> None:
    real_sync = shifts.manager._sync

    def sync() -> None:
        shifts.events.append(f"sync to {shifts.manager.report.version}")
        real_sync()

    shifts.manager._sync = sync  # type: ignore[method-assign]
    for number in range(1, 4):  # the first update is recorded, the others replayed
        shifts.shift()
        assert shifts.manager.report.verified == "full"
        assert shifts.events == [
            "policy releases its state",
            "engine maps ['weights']",
            f"sync to {number}",
            "policy releases all",
            "engine maps ['kv_cache']",
            "rollouts",
            "engine sleeps, saving []",
            "policy restores",
        ]
        shifts.events.clear()


def test_weights_that_are_kept_are_there_after_sleep_without_an_update(shifts: Shifts) -> None:
    shifts.policy.train()
    shifts.manager.wake(shifts.policy)
    asyncio.run(shifts.engine.sleep(1))
    assert shifts.events[-1] == "engine sleeps, saving ['weights']"
    with pytest.raises(EngineStateError):
        shifts.generate()
    asyncio.run(shifts.engine.wake())
    torch.testing.assert_close(shifts.generate(), expected(shifts.policy.weights))


def no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(worker: Any, level: int) -> None:
        CudaWorker.sleep(worker, level)
        worker._sleep_saved_buffers = {}

    monkeypatch.setattr(SleepingWorker, "sleep", sleep)


def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refill(recording: Recording) -> None:
        for target, _ in recording.fills:
            target.fill_(float(target.flatten()[0]))

    monkeypatch.setattr(Recording, "refill", refill)


def sync_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.wake

    async def wake_up(engine: Any, tags: Any) -> None:
        if tags == ["weights"]:
            engine.state.wake_weights()
        else:
            await engine.llm.wake_up(["weights"])
            await real(engine, tags)

    monkeypatch.setattr(Engine, "wake", wake_up)


def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wake_up(engine: Any, tags: Any) -> None:
        await engine.llm.wake_up(["weights"] if tags == ["weights"] else [])
        {"weights": engine.state.wake_weights, "kv_cache": engine.state.wake_kv_cache}[tags[0]]()

    monkeypatch.setattr(Engine, "wake", wake_up)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (no_buffers, AssertionError, "not close"),
        (no_padding, AssertionError, "not close"),
        (sync_first, RemoteError, "an illegal memory access: .* of weights, which are asleep"),
        (no_cache, RuntimeError, "an illegal memory access: .* of kv_cache, which are asleep"),
    ],
)
def test_the_fake_allocator_notices_use_of_sleeping_memory(
    shifts: Shifts,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    says: str,
) -> None:
    """The fake detects buffers not restored, padding not filled again, and memory used before it is mapped."""
    shifts.shift()
    fault(monkeypatch)
    with pytest.raises(error, match=says):
        shifts.shift()
        shifts.shift()  # buffers that were lost in one are missed in the next


def test_a_worker_that_cannot_wake_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def wake_up(worker: Any, tags: list[str] | None = None) -> None:
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:149")

    monkeypatch.setattr(CudaWorker, "wake_up", wake_up)
    worker = object.__new__(cuda_worker.CudaWorker)
    worker.device = torch.device("cuda:1")
    with pytest.raises(RuntimeError, match=r"^on cuda:1: CUDA Error: out of memory at cumem_allocator"):
        worker.wake_up(["weights"])
