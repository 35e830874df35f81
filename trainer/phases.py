"""Seconds and memory of each phase of a step, and the phase's name for the watchdog: all from one `with`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from sharding.collectives import all_reduce_max, all_reduce_sum, world_size
from sharding.manager import Leader
from trainer.flops import Work
from trainer.gpus import peak_flops
from trainer.memory import MemoryMeter
from trainer.watchdog import Watchdog

_GIB = 2**30
_ENGINE_STATES = ("awake", "asleep")


class PhaseMeter:
    """What each phase of a step costs. Phases have the deadline of a step: the watchdog says which one exceeded it."""

    def __init__(
        self,
        device: torch.device,
        leader: Leader | None,
        watchdog: Watchdog,
        deadline: float,
        works: Sequence[Work] = (),
        dtype: str = "bfloat16",
    ) -> None:
        """`works` are those of the models whose operations are counted, computed in `dtype`."""
        half = device.type == "cuda" and dtype == "bfloat16"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if half else None
        self._works, self._computed = works, np.zeros(2)
        self._memory = MemoryMeter(device)
        self._leader, self._watchdog, self._deadline = leader, watchdog, deadline
        self._seconds: dict[str, float] = {}
        self._engine: dict[str, float] = {}
        self._offloaded = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase `name`; several blocks of one name add up."""
        began, before = time.perf_counter(), self._work_done()
        with self._watchdog.phase(name, self._deadline), self._memory.phase(name), record_function(name):
            yield
        self.add_seconds({name: time.perf_counter() - began})
        if name == "update":
            self._computed += self._work_done() - before

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
        """time/<phase> in seconds and memory/… in GiB since the last call, of the rank with the most. Collective.

        And what updates did in the time of the slowest rank: throughput/update_tokens_per_s_per_device, prompts
        included; throughput/mfu, the share of the devices' peak (`trainer.flops`), where that is known.
        """
        metrics = {f"time/{name}": value for name, value in self._seconds.items()}
        metrics |= {f"memory/engine_gib_{state}": self._engine.get(state, 0.0) for state in _ENGINE_STATES}
        metrics |= self._memory.metrics() | {"memory/offloaded_gib": self._offloaded}
        computed = all_reduce_sum(dict(zip(("tokens", "flops"), self._computed, strict=True)))
        self._seconds, self._engine, self._offloaded, self._computed = {}, {}, 0.0, np.zeros(2)
        metrics = all_reduce_max(metrics)
        if seconds := world_size() * metrics.get("time/update", 0.0):
            metrics["throughput/update_tokens_per_s_per_device"] = computed["tokens"] / seconds
            if self._peak_flops is not None:
                metrics["throughput/mfu"] = computed["flops"] / seconds / self._peak_flops
        return metrics

    def _work_done(self) -> npt.NDArray[np.float64]:
        """Tokens learned from and operations on this rank so far, of all models."""
        return np.sum([[0.0, 0.0], *([work.tokens, work.flops] for work in self._works)], axis=0)
