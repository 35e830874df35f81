"""The bracket around a weight update: when an engine holds a version, and which one. Tested without vLLM."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from generation.engine.engine import Engine, WorkerError
from generation.engine.lifecycle import EngineStateError
from generation.engine.settings import EngineSettings, check_worker_classes
from sharding import SHARING_WORKER, WORKER_EXTENSION

SETTINGS = EngineSettings("none", 64)


class TwoWorkerLLM:
    """An AsyncLLM of two workers with scripted answers."""

    errored = False

    def __init__(self) -> None:
        self.running, self.resets, self.refuses = 0, 0, False
        self.outcomes: list[dict[str, Any]] = [{"error": None}, {"error": None}]

    def get_num_unfinished_requests(self) -> int:
        return self.running

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return not self.refuses

    async def collective_rpc(self, method: str, **_: Any) -> list[dict[str, Any]]:
        return self.outcomes


@pytest.fixture
def engine() -> Engine:
    engine = Engine(SETTINGS)
    engine._llm = TwoWorkerLLM()  # type: ignore[assignment]
    engine.state.adopt_checkpoint(4)
    return engine


def run(engine: Engine, version: int | None = None, error: Exception | None = None) -> list[int | None]:
    """Return the versions held inside an update and after it."""
    held: list[int | None] = []

    async def update() -> None:
        async with engine.update(version):
            held.append(engine.state.version)
            if error is not None:
                raise error
        held.append(engine.state.version)

    asyncio.run(update())
    return held


def test_inside_an_update_an_engine_holds_no_version_and_afterwards_the_new_one(engine: Any) -> None:
    assert run(engine, 9) == [None, 9]
    assert run(engine) == [None, 10]
    assert engine.llm.resets == 2


def test_an_update_that_breaks_off_leaves_no_version_until_a_complete_one(engine: Any) -> None:
    with pytest.raises(KeyError):
        run(engine, 9, KeyError("weight"))
    assert engine.state.version is None and engine.llm.resets == 0
    engine.llm.refuses = True
    with pytest.raises(RuntimeError, match="refused to reset its prefix cache"):
        run(engine, 9)
    assert engine.state.version is None
    engine.llm.refuses = False
    assert run(engine) == [None, 5]  # one more than the last that was complete


def test_weights_are_not_changed_under_running_requests(engine: Any) -> None:
    engine.llm.running = 3
    with pytest.raises(EngineStateError, match="3 requests would continue with other weights"):
        run(engine, 9)
    assert engine.state.version == 4


def test_workers_tell_the_version_and_their_complaints_end_the_update(engine: Any) -> None:
    engine.llm.outcomes = [{"error": None, "version": 7}, {"error": None, "version": 7}]
    asyncio.run(engine.receive("load"))
    assert engine.state.version == 7
    asyncio.run(engine.receive("load", version=3))
    assert engine.state.version == 3
    engine.llm.outcomes = [{"error": "worker 0: no"}, {"error": "worker 1: none"}]
    with pytest.raises(WorkerError, match="worker 0: no; worker 1: none"):
        asyncio.run(engine.receive("load"))
    assert engine.state.version is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "on CPU an engine sleeps by its worker extension"),
        (
            {"worker_extension": "sharding.nowhere.Extension"},
            "worker_extension is 'sharding.nowhere.Extension', but",
        ),
        ({"worker_extension": "nowhere.at_all.Extension"}, "there is no such module"),
        ({"worker_extension": "Extension"}, "name it as package.module.Class"),
        (
            {"worker_extension": WORKER_EXTENSION, "worker_class": "sharding.nowhere.Worker"},
            "worker_class is",
        ),
    ],
)
def test_classes_for_the_workers_are_looked_for_before_anything_starts(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        check_worker_classes(replace(SETTINGS, **changes))
    assert len(str(caught.value)) < 300
    check_worker_classes(replace(SETTINGS, sleep=False))
    check_worker_classes(
        replace(SETTINGS, worker_extension=WORKER_EXTENSION, worker_class=SHARING_WORKER)
    )
