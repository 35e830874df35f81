"""Seconds and memory of each phase of a step, and the phase's name for the watchdog: all from one `with`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sharding.collectives import all_reduce_max
from sharding.manager import Leader
from trainer.memory import MemoryMeter
from trainer.watchdog import Watchdog

_GIB = 2**30
_ENGINE_STATES = ("awake", "asleep")


class PhaseMeter:
    """What each phase of a step costs. Phases have the deadline of a step: the watchdog says which one exceeded it."""

    def __init__(self, device: torch.device, leader: Leader | None, watchdog: Watchdog, deadline: float) -> None:
        self._memory = MemoryMeter(device)
        self._leader, self._watchdog, self._deadline = leader, watchdog, deadline
        self._seconds: dict[str, float] = {}
        self._engine: dict[str, float] = {}
        self._offloaded = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase `name`; several blocks of one name add up."""
        began = time.perf_counter()
        with self._watchdog.phase(name, self._deadline), self._memory.phase(name):
            yield
        self.add_seconds({name: time.perf_counter() - began})

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Count time that was measured elsewhere."""
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    def note_engine_memory(self, state: str) -> None:
        """Measure the workers' memory now, under the name of the engine's state ("awake" or "asleep")."""
        if self._leader is not None:
            used = self._leader.thread.run(self._leader.engine.memory_bytes(), 60, "measuring the engine's memory")
            self._engine[state] = used / _GIB

    def note_offloaded(self, nbytes: int) -> None:
        """Count what the trainer put away for a generation shift; of several shifts the largest counts."""
        self._offloaded = max(self._offloaded, nbytes / _GIB)

    def take(self) -> dict[str, float]:
        """time/<phase> in seconds and memory/… in GiB since the last call, of the rank with the most. Collective."""
        metrics = {f"time/{name}": value for name, value in self._seconds.items()}
        metrics |= {f"memory/engine_gib_{state}": self._engine.get(state, 0.0) for state in _ENGINE_STATES}
        metrics |= self._memory.metrics() | {"memory/offloaded_gib": self._offloaded}
        self._seconds, self._engine, self._offloaded = {}, {}, 0.0
        return all_reduce_max(metrics)
