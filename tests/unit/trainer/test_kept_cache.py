"""The size of a KV cache that vLLM has measured, kept for a run's later sessions. Without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from sharding.ranks import rank
from tests.support.learning_steps import on_ranks
from tests.support.recipes import make_config
from trainer import start as module
from trainer.run.keeper import RunState
from trainer.start import keep_cache_size, with_kept_cache

MEASURED = {"engine": {"kv_cache_gib": None, "gpu_memory_utilization": 0.5}}


class Leading:
    """An engine whose KV cache has `size` bytes, and its leader, in one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.engine = self.thread = self

    def call_workers(self, method: str) -> list[int]:
        assert method == "hotbunk_kv_cache_bytes"
        return [self.size, self.size - 4096]

    def run(self, sizes: list[int], timeout: float, what: str) -> list[int]:
        return sizes


def started(config: Any, leader: Leading | None) -> Any:
    return SimpleNamespace(config=config, leader=leader, state=RunState())


def resumed(state: RunState, **sections: Any) -> tuple[float | None, list[str]]:
    """Return the size (GiB) with which a run starts its engines, and what it says of it."""
    notes: list[str] = []
    config = with_kept_cache(make_config(**sections), state, notes.append)
    return config.engine.kv_cache_gib, notes


def test_a_resumed_run_has_the_smallest_cache_of_its_earlier_engines() -> None:
    """Four ranks, of which the first and the third lead an engine; all keep the same."""
    sizes = {0: (5 << 30) + 4096, 2: (5 << 30) + 12288}

    def keep() -> RunState:
        leader = Leading(sizes[rank()]) if rank() in sizes else None
        start = started(make_config(**MEASURED), leader)
        keep_cache_size(start)
        return start.state

    states = on_ranks(4, keep)
    assert all(state == states[0] for state in states)
    gib, notes = resumed(states[3], **MEASURED)
    assert gib is not None and int(gib * 2**30) == (5 << 30) + 4096
    assert notes == ["KV cache: 5.00 GiB for each worker of an engine, as in the run's earlier sessions"]


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": MEASURED["engine"] | {"gpu_memory_utilization": 0.4}},
        {"engine": MEASURED["engine"] | {"tensor_parallel_size": 2}},
        {"engine": {"kv_cache_gib": 7.0}},
    ],
    ids=["another share", "more workers", "a size of its own"],
)
def test_what_decides_the_size_is_asked_first(sections: dict[str, Any]) -> None:
    start = started(make_config(**MEASURED), Leading(5 << 30))
    keep_cache_size(start)
    assert resumed(start.state, **sections) == (sections["engine"].get("kv_cache_gib"), [])


def test_another_device_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    start = started(make_config(**MEASURED), Leading(5 << 30))
    keep_cache_size(start)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 40))
    assert resumed(start.state, **MEASURED) == (None, [])


def test_a_size_that_the_recipe_gives_is_not_kept() -> None:
    start = started(make_config(engine={"kv_cache_gib": 1.0}), Leading(1 << 30))
    keep_cache_size(start)
    assert start.state == RunState()
    assert resumed(RunState(), **MEASURED) == (None, [])
