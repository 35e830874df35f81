"""A trace of some steps of rank 0: its calls of torch, its kernels, and the phases they are in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


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
            self._steps = number, last
        with torch.profiler.record_function(f"step {number}"):
            yield
        if self._profile is not None and number == last:
            self._write(*self._steps)

    def _write(self, first: int, last: int) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps_{first}_{last}.json.gz"
        unfinished = path.with_name(f"unfinished_{path.name}")  # what writes it goes by the end of the name
        self._profile.export_chrome_trace(str(unfinished))
        os.replace(unfinished, path)
        self._profile = None
