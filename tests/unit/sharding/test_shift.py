"""The order in which memory is handed over in a generation shift, written down by an engine and a trainer under a
manager.
"""

import asyncio
import functools
import math
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation.engine.engine import Leader
from generation.engine.lifecycle import Memory
from generation.engine.sampling import NotFiniteError
from sharding.manager import ShardingManager
from sharding.ranks import rank
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource
from sharding.transports.zero_copy import ZeroCopy
from tests.support.learning_steps import on_ranks
from trainer.types import culprits

Events = list[str]


class FakeEngine:
    settings = SimpleNamespace(dtype="float32")

    def __init__(self, events: Events) -> None:
        self.events = events
        self.state = SimpleNamespace(memory=Memory.AWAKE)

    async def wake(self, tags: list[str]) -> None:
        self.state.memory = Memory.AWAKE
        self.events.append(f"engine maps {tags[0]}")

    async def sleep(self, level: int) -> None:
        self.state.memory = Memory.ASLEEP
        self.events.append("engine sleeps" if level == 2 else "KV cache sleeps")

    async def prompt_logprobs_of_all(self, token_ids: list[int]) -> list[list[float]]:
        self.events.append("engine is probed")
        return [[-1.0] * (len(token_ids) - 1)]


class FakeThread:
    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float, phase: str) -> Any:
        return asyncio.run(coroutine)


class FakeTenant:
    version = 3

    def __init__(self, name: str, events: Events) -> None:
        self.name, self.events, self.away = name, events, False

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        assert not self.away, "its weights are needed for that"
        self.events.append(f"{self.name} scores")
        return [-1.0] * (len(token_ids) - 1)

    def release(self, weights: bool) -> int:
        self.away = weights
        self.events.append(f"{self.name} releases {'all' if weights else 'state'}")
        return 7 if weights else 100

    def restore(self) -> None:
        self.away = False
        self.events.append(f"{self.name} restores")


class RecordingManager(ShardingManager):
    """A real manager that sends nothing."""

    def __init__(self, events: Events, folder: Path, plain: bool, shared: bool = False) -> None:
        source = FsdpWeightSource([("embed", torch.zeros(5, 2))], torch.float32)
        leader = Leader(FakeEngine(events), FakeThread())  # type: ignore[arg-type]
        device = torch.device("cpu")
        way = ZeroCopy(device, source.parameters(), lambda memory: None, 1) if shared else None
        super().__init__(source, device, SyncSettings(), folder, leader=leader, way=way)
        self.events, self.plain = events, plain

    def connect(self) -> None:
        self.events.append(f"listens at {Path(self._channel.endpoint).name}")

    def _sync(self, calls: object = None) -> None:
        self.events.append(f"sync to {self.report.version}")
        self._update.verification.comparable = self.plain


def test_a_worker_reads_shared_weights_after_the_trainers_stream_wrote_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA an optimizer step returns before its kernels have run, and the worker is another process."""
    events: Events = []
    way = ZeroCopy(torch.device("cuda", 3), [], lambda memory: None, 1)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            synchronize=lambda: events.append(f"trainer's stream on {device} is done")
        )

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    update: Any = SimpleNamespace(push_all=lambda: events.append("buckets"), post=events.append)
    way.transfer(update)
    way.in_place = True
    way.transfer(update)
    assert events == ["buckets", "trainer's stream on cuda:3 is done", "in_place"]


@pytest.mark.parametrize("plain", [True, False], ids=["weights compared", "probed"])
def test_the_trainer_leaves_before_the_engine_comes_and_returns_after_it_went(
    tmp_path: Path, plain: bool
) -> None:
    events: Events = []
    manager = RecordingManager(events, tmp_path, plain)
    policy, critic = FakeTenant("policy", events), FakeTenant("critic", events)
    manager.sleep()
    assert events == ["engine sleeps"], "at the start nobody has left yet"
    events.clear()
    with manager.generation_shift(policy, critic):
        events.append("rollouts")
    manager.close()
    assert [event for event in events if "score" not in event and "probe" not in event] == [
        "policy releases state",
        "critic releases all",
        "engine maps weights",
        "sync to 3",
        "policy releases all",
        "engine maps kv_cache",
        "rollouts",
        "engine sleeps",
        "policy restores",
        "critic restores",
    ]
    asked = (
        []
        if plain
        else [events.index("policy scores") - events.index("sync to 3"), "engine is probed" in events]
    )
    assert asked == ([] if plain else [1, True]), "the policy is asked while it has its weights"
    assert manager.report.offloaded == 114
    assert {"offload", "onload"} <= manager.report.seconds.keys()


def test_weights_that_are_shared_are_so_before_the_policy_s_own_go_and_never_sleep(
    tmp_path: Path,
) -> None:
    events: Events = []
    manager = RecordingManager(events, tmp_path, plain=True, shared=True)
    policy = FakeTenant("policy", events)
    manager.sleep()
    for _ in range(2):
        with manager.generation_shift(policy):
            events.append("rollouts")
    manager.close()
    shift = [
        "policy releases state",
        "engine maps weights",
        "sync to 3",
        "policy releases all",
        "engine maps kv_cache",
        "rollouts",
        "KV cache sleeps",
        "policy restores",
    ]
    assert events == ["KV cache sleeps", *shift, *shift]


@pytest.mark.parametrize("dies", [Memory.ASLEEP, Memory.AWAKE, Memory.CLOSED])
def test_an_engine_starts_again_in_a_trainer_that_has_put_away_what_a_shift_does(
    tmp_path: Path, dies: Memory
) -> None:
    """Any of several engines can start again; one that is awake after another's death sleeps first."""
    events: Events = []
    manager = RecordingManager(events, tmp_path, plain=True)
    policy, critic = FakeTenant("policy", events), FakeTenant("critic", events)
    assert manager._leader is not None
    engine = manager._leader.engine
    engine.state.memory = dies

    def start() -> None:
        if dies is Memory.CLOSED:
            events.append("engine starts")
            engine.state.memory = Memory.AWAKE

    manager.restart(start, policy, critic)
    assert events == [
        *(["engine sleeps"] if dies is Memory.AWAKE else []),
        "policy releases all",
        "critic releases all",
        *(["engine starts"] if dies is Memory.CLOSED else []),
        *(["engine sleeps"] if dies is Memory.CLOSED else []),
        "policy restores",
        "critic restores",
        "listens at weights-0-1",  # the first time it was weights-0-0
    ]
    manager.close()


def test_a_nonsense_policy_is_told_from_an_engine_with_other_weights(tmp_path: Path) -> None:
    """Invalid weights of the policy are found before it gives up its memory, so that they can be searched."""
    events: Events = []
    manager = RecordingManager(events, tmp_path, plain=False)
    policy = FakeTenant("policy", events)
    policy.score_tokens = lambda token_ids: [-1.0, math.nan] * len(token_ids)  # type: ignore[method-assign]
    with pytest.raises(NotFiniteError, match="the policy gives random tokens a log-probability of nan"):
        with manager.generation_shift(policy):
            raise AssertionError("the shift has begun")
    assert not policy.away and "engine is probed" not in events
    manager.sleep()
    manager.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_first_parameter_that_is_not_finite_is_named_whichever_rank_has_it(ranks: int) -> None:
    """Under ZeRO-3 each rank searches only its part; whole tensors are the same on every rank."""

    def clause(bad: dict[str, int]) -> str:
        """Return the clause about parameters, of which `bad` maps names to the rank that holds an infinity."""
        full_tensor, cut = torch.zeros(3, 2), torch.empty(0)
        cut.ds_tensor = torch.zeros(4)  # type: ignore[attr-defined]
        parameters = {"a": full_tensor, "b": cut}
        for name, where in bad.items():
            held = full_tensor if name == "a" else cut.ds_tensor  # type: ignore[attr-defined]
            held.view(-1)[-1] = math.inf if where == rank() else 0.0
        return culprits(SimpleNamespace(named_parameters=lambda: iter(parameters.items())))  # type: ignore[arg-type]

    last = ranks - 1
    for bad, expected in (
        ({}, "all parameters of the policy are finite"),
        ({"b": last}, "the policy's parameter b holds values that are not finite"),
        (
            {"a": last, "b": 0},
            "the policy's parameter a (the first of 2) holds values that are not finite",
        ),
    ):
        clauses = on_ranks(ranks, functools.partial(clause, bad))
        assert len(set(clauses)) == 1 and clauses[0].startswith(expected)
