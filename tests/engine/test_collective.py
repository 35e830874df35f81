"""Weights for engines apart from the trainer: broadcast to two real ones, read from a folder; and what goes wrong."""

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from colocated import HfPolicy, start_engine, stop
from conftest import TinyModel

from generation.sampling import SamplingSettings
from generation.worker_async import VllmAsyncGenerationWorker
from sharding.collective import CollectiveSender, engine_ranks
from sharding.sending import SyncSettings
from sharding.source import FsdpWeightSource
from trainer.policy.checkpoint_names import checkpoint_views, parameter_names

PROMPT = [20 + i for i in range(40)]  # several blocks of the prefix cache
SETTINGS = SyncSettings("full", bucket_bytes=1 << 16, timeout=30)


class Apart:
    """A policy in this process, and two engines that know of it only what comes over the group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = HfPolicy(folder)
        self.engines = [start_engine(folder, plain=True), start_engine(folder, plain=False)]
        self.sender = self.join(SETTINGS)

    def source(self) -> FsdpWeightSource:
        model = self.policy.model
        layout = lambda name, shape: checkpoint_views(model, name, shape)  # noqa: E731
        return FsdpWeightSource(list(parameter_names(model).items()), torch.float32, layout)

    def call(self, action: Callable[[VllmAsyncGenerationWorker], Coroutine[Any, Any, Any]]) -> list[Future[Any]]:
        return [leader.thread.submit(action(leader.engine)) for leader in self.engines]

    def join(self, settings: SyncSettings) -> CollectiveSender:
        world_size, ranks = engine_ranks(2, 1)
        sender = CollectiveSender(self.source(), torch.device("cpu"), settings, workers=2)
        calls = [
            leader.thread.submit(
                leader.engine.init_collective_async(first - 1, sender.ip, sender.port, world_size, 1, settings.timeout)
            )
            for leader, first in zip(self.engines, ranks, strict=True)
        ]
        sender.connect(calls)
        for call in calls:
            call.result(30)
        return sender

    def update(self, seconds: float = 30.0) -> list[Future[Any]]:
        return self.call(lambda engine: engine.update_weights_from_collective_async(seconds))

    def send(self) -> None:
        self.policy.randomise(self.policy.version + 50)
        self.sender.send(self.policy.version, self.update())

    def gaps(self) -> list[float]:
        """Each engine's log-probabilities against plain Transformers'."""
        gaps = []
        for leader in self.engines:
            sampling = SamplingSettings(max_tokens=24)
            request = leader.engine.complete(PROMPT, sampling, seed=1, policy_version=self.policy.version)
            sampled = leader.thread.run(request, 60, "a completion")
            own = self.policy.logprobs(PROMPT + sampled.token_ids)[len(PROMPT) - 1 :]
            gaps.append(max(abs(a - b) for a, b in zip(own, sampled.logprobs, strict=True)))
        return gaps


@pytest.fixture(scope="module")
def apart(tiny_model: TinyModel) -> Iterator[Apart]:
    apart = Apart(tiny_model())
    yield apart
    apart.sender.close()
    for leader in apart.engines:
        stop(leader)


def test_n11_t34_broadcast_weights_are_the_policys_on_every_engine(apart: Apart) -> None:
    for _ in range(2):
        apart.send()
        assert max(apart.gaps()) < 1e-4
        assert max(apart.gaps()) < 1e-4
