"""How much memory this process holds, now and at its peak in each phase, measured without a sampling thread."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.machine import host_gib

_GIB = 1024**3


def rss_gib(pid: int | None = None) -> float:
    """Resident memory of a process (None: this one) in GiB: what it allocated and shared memory it has touched.

    Pages of libraries and other files are left out: they are everybody's and the kernel can drop them. Memory that
    trainer and engine share counts on both sides.
    """
    return _allocated(_status(pid)) / _GIB


def device_used_gib(device: torch.device) -> float:
    """Memory in use on a CUDA device in GiB, by whichever process: torch's own counters do not see the engine's."""
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / _GIB


def device_total_gib(cuda: bool) -> float:
    """What a CUDA device has, or else this machine, in GiB."""
    if cuda:
        return torch.cuda.mem_get_info()[1] / _GIB
    return host_gib()


class MemoryMeter:
    """Peak memory of this process in each phase: `with meter.phase("update"): ...`, then `meter.metrics()`.

    On CUDA it is the peak of torch's reserved memory, on CPU the peak resident size, which the kernel keeps count of.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, float] = {}
        self._allocator: dict[str, int] = {}
        self._retries = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`; of several blocks of that name the largest counts."""
        self._reset()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0.0), self._peak_gib())

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
        """Before its peaks begin anew."""
        statistics = torch.cuda.memory_stats(self._device)
        for name in ("allocated", "reserved"):
            key, peak = f"peak_{name}_bytes", statistics.get(f"{name}_bytes.all.peak", 0)
            self._allocator[key] = max(self._allocator.get(key, 0), peak)

    def _reset(self) -> None:
        if self._device.type == "cuda":
            self._note_allocator()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak_rss()

    def _peak_gib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) / _GIB
        status = _status(None)
        # The kernel's peak counts file pages too, those of libraries; they hardly change within a phase.
        return max(status["VmHWM"] - status["RssFile"], _allocated(status)) / _GIB


def _reset_peak_rss() -> None:
    """Have the kernel start VmHWM anew. Where it may not (some sandboxes), a peak is that of the process's life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status(pid: int | None) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{os.getpid() if pid is None else pid}/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields}


def _allocated(status: dict[str, int]) -> int:
    return status["RssAnon"] + status["RssShmem"]
