"""Seconds, memory and operations of each phase of a step, and its name for the watchdog, all from one `with`.

And a trace of some steps of rank 0: its calls of torch, its kernels, and the phases they are in.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from generation.engine.engine import Leader
from sharding.ranks import agreed, all_reduce_max, all_reduce_sum, world_size
from trainer.config.schema import TrainConfig
from trainer.estimates.gpus import peak_flops
from trainer.model_structure import Work
from trainer.run.watchdog import Watchdog

_GIB = 1024**3


class PhaseMeter:
    """Time and memory of each phase of a step. Phases have the step's deadline; the watchdog names a late one."""

    def __init__(
        self, config: TrainConfig, device: torch.device, leader: Leader | None, watchdog: Watchdog, *works: Work
    ) -> None:
        """`works` are those of the models whose operations are counted."""
        half = device.type == "cuda" and config.policy.dtype == "bfloat16"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if half else None
        self._works = works
        self._computed = np.zeros(2)
        self._memory = MemoryMeter(device)
        self._leader = leader
        self._watchdog = watchdog
        self._deadline = config.run.first_step_deadline_s
        self._seconds = defaultdict[str, float](float)
        self._engine: dict[str, float] = {}
        self._offloaded = 0.0

    @contextmanager
    def phase(self, name: str, waits_for: Callable[[], str] = str) -> Iterator[None]:
        """The block is phase `name`; several blocks of one name add up. `waits_for`: see `Watchdog.phase`."""
        began, before = time.perf_counter(), self._work_done()
        with self._watchdog.phase(name, self._deadline, waits_for), self._memory.phase(name), record_function(name):
            yield
        self._seconds[name] += time.perf_counter() - began
        if name == "update":
            self._computed += self._work_done() - before

    def note_engine_memory(self, state: str) -> None:
        """Measure the workers' memory now, under the name of the engine's state ("awake" or "asleep"). Collective."""
        with agreed("measuring the engine's memory"):
            if self._leader is not None:
                used = self._leader.thread.run(self._leader.engine.memory_bytes(), 60, "measuring the engine's memory")
                self._engine[state] = used / _GIB

    def note_shift(self, seconds: dict[str, float], offloaded: int) -> None:
        """Count a generation shift's own seconds, and its bytes moved to the host; of several shifts the most count."""
        for name, value in seconds.items():
            self._seconds[name] += value
        self._offloaded = max(self._offloaded, offloaded / _GIB)

    def take(self) -> dict[str, float]:
        """time/<phase> in seconds and memory/… in GiB since the last call, of the rank with the most. Collective.

        Of updates, in the time of the slowest rank, also throughput/update_tokens_per_s_per_device, prompts included,
        and throughput/mfu, the share of the devices' peak (`trainer.model_structure`), where that is known.
        """
        metrics = {f"time/{name}": value for name, value in self._seconds.items()}
        metrics |= {f"memory/engine_gib_{state}": self._engine.get(state, 0.0) for state in ("awake", "asleep")}
        metrics |= self._memory.metrics() | {"memory/offloaded_gib": self._offloaded}
        computed = all_reduce_sum(dict(zip(("tokens", "flops"), self._computed, strict=True)))
        self._seconds.clear()
        self._engine, self._offloaded, self._computed = {}, 0.0, np.zeros(2)
        metrics = all_reduce_max(metrics)
        if seconds := world_size() * metrics.get("time/update", 0.0):
            metrics["throughput/update_tokens_per_s_per_device"] = computed["tokens"] / seconds
            if self._peak_flops is not None:
                metrics["throughput/mfu"] = computed["flops"] / seconds / self._peak_flops
        return metrics

    def _work_done(self) -> npt.NDArray[np.float64]:
        """Tokens learned from and operations on this rank so far, of all models."""
        return np.sum([[0.0, 0.0], *([work.tokens, work.flops] for work in self._works)], axis=0)


class MemoryMeter:
    """Peak memory of this process in each phase: `with meter.phase("update"): ...`, then `meter.metrics()`.

    On CUDA it is the peak of torch's reserved memory. On CPU it is the peak resident size, which the kernel keeps count
    of, so that no thread has to sample; memory that trainer and engine share counts on both sides.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, float] = {}
        self._allocator: dict[str, int] = {}
        self._retries = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`; of several blocks of that name the largest counts."""
        if self._device.type == "cuda":
            self._note_allocator()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # some sandboxes refuse: then a peak is that of the process's life
                Path("/proc/self/clear_refs").write_bytes(b"5")
        try:
            yield
        finally:
            if self._device.type == "cuda":
                peak = torch.cuda.max_memory_reserved(self._device)
            else:
                # psutil knows neither this peak nor shared memory apart from mapped files. The peak counts the pages of
                # files too, those of libraries, which are shared; they hardly change within a phase.
                status = Path("/proc/self/status").read_text("utf-8", "replace")
                sizes = dict(re.findall(r"(VmHWM|RssFile):\s+(\d+) kB", status))
                peak = (int(sizes["VmHWM"]) - int(sizes["RssFile"])) * 1024
            self._peaks[name] = max(self._peaks.get(name, 0.0), peak / _GIB)

    def metrics(self) -> dict[str, float]:
        """memory/trainer_gib_<phase> of every phase since the last call.

        On CUDA, of torch's allocator since then, between phases, too: memory/peak_allocated_bytes,
        memory/peak_reserved_bytes, and memory/alloc_retries, how often it had to give all its free blocks back first.
        """
        metrics = {f"memory/trainer_gib_{name}": peak for name, peak in self._peaks.items()}
        if self._device.type == "cuda":
            self._note_allocator()
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            metrics |= {f"memory/{name}": float(value) for name, value in self._allocator.items()}
            metrics["memory/alloc_retries"] = float(retries - self._retries)
            self._retries = retries
        self._peaks, self._allocator = {}, {}
        return metrics

    def _note_allocator(self) -> None:
        """Keep torch's peaks before they are reset."""
        statistics = torch.cuda.memory_stats(self._device)
        for name in ("allocated", "reserved"):
            key, peak = f"peak_{name}_bytes", statistics.get(f"{name}_bytes.all.peak", 0)
            self._allocator[key] = max(self._allocator.get(key, 0), peak)


class StepProfiler:
    """Records steps `first` to `last`, and writes them to `folder`/steps_FIRST_LAST.json.gz.

    That opens in Perfetto (ui.perfetto.dev). Engines are other processes and not in it.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, device: torch.device, enabled: bool) -> None:
        """`steps`: first and last, both included; None, or not `enabled`: it does nothing."""
        self._steps = steps if enabled else None
        self._folder = folder
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is step `number`. A run that begins between first and last records from there."""
        if self._steps is None:
            yield
            return
        first, last = self._steps
        if self._profile is None and first <= number <= last:
            self._profile = profile(activities=self._activities, record_shapes=True, profile_memory=True)
            self._profile.start()
            self._steps = first, last = number, last
        with torch.profiler.record_function(f"step {number}"):
            yield
        if self._profile is not None and number == last:
            self._profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"steps_{first}_{last}.json.gz"
            unfinished = path.with_name(f"unfinished_{path.name}")  # torch.profiler compresses by the end of the name
            self._profile.export_chrome_trace(str(unfinished))
            os.replace(unfinished, path)
            self._profile = None
