"""Run the real sharding manager and the real worker extension in one process, around a model of a few parameters."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from generation.engine.engine import Engine, Leader
from generation.engine.settings import EngineSettings
from sharding.manager import ShardingManager
from sharding.report import SyncReport, SyncSettings
from sharding.send.source import ShardedSource
from sharding.transports.base import Transport
from sharding.worker import extension


class SmallModel(nn.Module):
    """One rank's part of five weights, with loaders like vLLM's: fused, cut, padded or computed."""

    def __init__(
        self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32, times: int = 1
    ) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        # Three fifths are `a`, the rest `b`
        self.rows = nn.Parameter(torch.zeros(20 * times // ranks, 6, dtype=dtype))
        self.columns = nn.Parameter(torch.zeros(5 * times, 8 // ranks, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(7 * times, dtype=dtype))
        self.scaled = nn.Parameter(torch.zeros(3 * times, dtype=dtype))

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name in ("a", "b"):
                part = weight.chunk(self.ranks)[self.rank]
                (self.rows.data[: len(part)] if name == "a" else self.rows.data[-len(part) :]).copy_(
                    part
                )
            elif name == "columns":
                self.columns.data.copy_(weight.chunk(self.ranks, dim=1)[self.rank])
            elif name == "norm":
                self.norm.data.copy_(weight)
            else:
                self.scaled.data.copy_(weight * 2)


def small_weights(seed: int, times: int = 1) -> dict[str, Tensor]:
    """Random weights for `SmallModel` to load; `times` multiplies the rows of both."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (12, 6), "b": (8, 6), "columns": (5, 8), "norm": (7,), "scaled": (3,)}
    return {
        name: torch.randn(rows * times, *rest, generator=generator)
        for name, (rows, *rest) in shapes.items()
    }


class Worker(extension.VllmInternalWorkerExtension):
    """Stands in for vLLM's worker, which the extension extends."""

    device = torch.device("cpu")

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model, self.rank, self.vllm_config = model, 0, vllm_config

    @classmethod
    def of(cls, model: SmallModel) -> "Worker":
        """Wrap a small model."""
        config = SimpleNamespace(dtype=model.norm.dtype, model="of no folder", hf_config=None)
        ranks = SimpleNamespace(tensor_parallel_size=model.ranks)
        return cls(model, SimpleNamespace(model_config=config, parallel_config=ranks))

    def get_model(self) -> Any:
        return self.model


class IdleLLM:
    """Stands in for an AsyncLLM that has no requests."""

    errored = False

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def reset_prefix_cache(self) -> bool:
        return True


class OneWorker(Engine):
    """An engine with one worker, in this process."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(EngineSettings("none", 64, sleep=False))
        self._llm = IdleLLM()  # type: ignore[assignment]
        self.worker = worker

    async def call_workers(self, method: str, *arguments: Any, **_: Any) -> list[Any]:
        return [getattr(self.worker, method)(*arguments)]


class Thread:
    """Stands in for an engine's thread: its worker does one thing after another."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return self._pool.submit(asyncio.run, coroutine)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float, phase: str) -> Any:
        return self.submit(coroutine).result(timeout)


class InProcess:
    """A manager and its worker, whose weights are plain where `extension._PLAIN_ON_CPU` says so.

    `sync` sends a version; a failed update raises `RemoteError`.
    """

    def __init__(
        self,
        source: ShardedSource,
        model: SmallModel | Worker,
        folder: Path,
        way: Transport | None = None,
        **settings: Any,
    ) -> None:
        self.worker = model if isinstance(model, Worker) else Worker.of(model)
        fields: dict[str, Any] = {"verify": "full", "timeout": 20} | settings
        self.manager = ShardingManager(
            source,
            torch.device("cpu"),
            SyncSettings(**fields),
            folder,
            leader=Leader(OneWorker(self.worker), Thread()),  # type: ignore[arg-type]
            way=way,
        )
        self.manager.connect()

    def sync(self, version: int) -> None:
        """Send the weights as this version."""
        self.manager.report = SyncReport(version)
        self.manager._sync()

    def die(self, model: SmallModel) -> None:
        """Replace the worker, as a restart of the engine does; `manager.restart` is to follow."""
        self.worker = Worker.of(model)
        leader = self.manager._leader
        assert leader is not None and isinstance(leader.engine, OneWorker)
        leader.engine.worker = self.worker
