"""Measure the time, memory and operations of each phase of a step, and record profiles of some
steps.

A profile has rank 0's torch calls and kernels, and the phases they belong to.
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
    """Measures time and memory of each phase of a step, and sets the phase's deadline in the
    watchdog.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        leader: Leader | None,
        watchdog: Watchdog,
        *works: Work,
    ) -> None:
        """Begin to measure. `works` count what the models compute."""
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
        """Measure the block as phase `name`; blocks with one name add up. For `waits_for` see
        `Watchdog.phase`.
        """
        began = time.perf_counter()
        before = self._work_done()
        with (
            self._watchdog.phase(name, self._deadline, waits_for),
            self._memory.phase(name),
            record_function(name),
        ):
            yield
        self._seconds[name] += time.perf_counter() - began
        if name == "update":
            self._computed += self._work_done() - before

    def note_engine_memory(self, state: str) -> None:
        """Measure the engine workers' memory now, in the engine's state "awake" or "asleep".
        Collective.
        """
        with agreed("measuring the engine's memory"):
            if self._leader is not None:
                used = self._leader.thread.run(
                    self._leader.engine.memory_bytes(), 60, "measuring the engine's memory"
                )
                self._engine[state] = used / _GIB

    def note_shift(self, seconds: dict[str, float], offloaded: int) -> None:
        """Add the seconds of a generation shift by phase, and keep the largest number of bytes
        moved to the host.
        """
        for name, value in seconds.items():
            self._seconds[name] += value
        self._offloaded = max(self._offloaded, offloaded / _GIB)

    def take(self) -> dict[str, float]:
        """Return time/<phase> (s) and memory/… (GiB) since the last call, as maxima over ranks.
        Collective.

        For updates it adds throughput/update_tokens_per_s_per_device, which includes prompts, and
        throughput/mfu, the share of the devices' peak (see `trainer.model_structure`), if that is
        known. Both use the slowest rank's time.
        """
        metrics = {f"time/{name}": value for name, value in self._seconds.items()}
        metrics |= {
            f"memory/engine_gib_{state}": self._engine.get(state, 0.0) for state in ("awake", "asleep")
        }
        metrics |= self._memory.metrics() | {"memory/offloaded_gib": self._offloaded}
        computed = all_reduce_sum(dict(zip(("tokens", "flops"), self._computed, strict=True)))
        self._seconds.clear()
        self._engine = {}
        self._offloaded = 0.0
        self._computed = np.zeros(2)
        metrics = all_reduce_max(metrics)
        if seconds := world_size() * metrics.get("time/update", 0.0):
            metrics["throughput/update_tokens_per_s_per_device"] = computed["tokens"] / seconds
            if self._peak_flops is not None:
                metrics["throughput/mfu"] = computed["flops"] / seconds / self._peak_flops
        return metrics

    def _work_done(self) -> npt.NDArray[np.float64]:
        """Return the trained tokens and the operations of all models on this rank so far."""
        return np.sum([[0.0, 0.0], *([work.tokens, work.flops] for work in self._works)], axis=0)


class MemoryMeter:
    """Measures peak memory of this process in each phase: `with meter.phase("update"): ...`, then
    `meter.metrics()`.

    On CUDA it is the peak of torch's reserved memory. On CPU it is the peak resident size, which
    the kernel records, so that no thread has to sample; memory that trainer and engine share counts
    on both sides.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, float] = {}
        self._allocator: dict[str, int] = {}
        self._retries = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`; of several blocks with one name the largest peak
        counts.
        """
        if self._device.type == "cuda":
            self._note_allocator()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):
                # some sandboxes refuse; then the peak covers the life of the process
                Path("/proc/self/clear_refs").write_bytes(b"5")
        try:
            yield
        finally:
            if self._device.type == "cuda":
                peak = torch.cuda.max_memory_reserved(self._device)
            else:
                # psutil reports neither this peak nor shared memory separately from mapped files.
                # The peak includes the pages of files, mostly of shared libraries, which hardly
                # change within a phase.
                status = Path("/proc/self/status").read_text("utf-8", "replace")
                sizes = dict(re.findall(r"(VmHWM|RssFile):\s+(\d+) kB", status))
                peak = (int(sizes["VmHWM"]) - int(sizes["RssFile"])) * 1024
            self._peaks[name] = max(self._peaks.get(name, 0.0), peak / _GIB)

    def metrics(self) -> dict[str, float]:
        """Return memory/trainer_gib_<phase> of every phase since the last call.

        On CUDA it adds metrics of torch's allocator since then, also between phases:
        memory/peak_allocated_bytes, memory/peak_reserved_bytes, and memory/alloc_retries, the
        number of times it had to free cached blocks first.
        """
        metrics = {f"memory/trainer_gib_{name}": peak for name, peak in self._peaks.items()}
        if self._device.type == "cuda":
            self._note_allocator()
            retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            metrics |= {f"memory/{name}": float(value) for name, value in self._allocator.items()}
            metrics["memory/alloc_retries"] = float(retries - self._retries)
            self._retries = retries
        self._peaks = {}
        self._allocator = {}
        return metrics

    def _note_allocator(self) -> None:
        """Save torch's peaks before they are reset."""
        statistics = torch.cuda.memory_stats(self._device)
        for name in ("allocated", "reserved"):
            key = f"peak_{name}_bytes"
            peak = statistics.get(f"{name}_bytes.all.peak", 0)
            self._allocator[key] = max(self._allocator.get(key, 0), peak)


class StepProfiler:
    """Profiles steps `first` to `last`, and writes a trace to `folder`/steps_FIRST_LAST.json.gz.

    The trace opens in Perfetto (ui.perfetto.dev). It does not contain engines, which are other
    processes.
    """

    def __init__(
        self, steps: tuple[int, int] | None, folder: Path, device: torch.device, enabled: bool
    ) -> None:
        """Take the first and the last of the `steps`, both included; with None, or if not
        `enabled`, do nothing.
        """
        self._steps = steps if enabled else None
        self._folder = folder
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block as step `number`. A run that resumes between first and last records
        from there.
        """
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
            # torch.profiler compresses if the name ends in .gz
            unfinished = path.with_name(f"unfinished_{path.name}")
            self._profile.export_chrome_trace(str(unfinished))
            os.replace(unfinished, path)
            self._profile = None
