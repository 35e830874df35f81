"""A run's checkpoints as it goes on: written by a thread while training continues, one at a time, and few of them kept.

`save` copies the sharded tensors to host memory and returns; what is written is the run at that moment, whatever the
next steps do to it. The thread's exchanges between ranks have a process group of their own, since two threads that use
one group mix up each other's messages. The copy takes each rank's share of the checkpoint's size in host memory, until
it is written.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from generation.devices import this_device
from trainer import checkpoint
from trainer.config import CheckpointConfig
from trainer.distributed import agreed
from trainer.errors import UserError


class CheckpointWriter:
    """Saves into one folder, and deletes there what `checkpoint.keep` and `checkpoint.keep_best` do not name."""

    def __init__(self, folder: Path, config: CheckpointConfig, timeout: float) -> None:
        """Collective. `timeout` (seconds) is the deadline of writing one checkpoint."""
        self._folder, self._config, self._timeout = folder, config, timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=this_device())
        self._writing: Future[None] | None = None

    def save(self, step: int, parts: checkpoint.Parts, extra: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save the run as it is now; returns when it is copied, or with `checkpoint.background: false` written.

        Collective. Waits first for the checkpoint before, and raises on all ranks what went wrong with that.
        """
        self.wait()
        check_best_metric(self._config, step, metrics)
        with agreed("checkpoint (copy)"):
            snapshot = checkpoint.Snapshot.take(step, parts, extra | {"metrics": metrics})
            if self._config.background:
                snapshot = snapshot.on_host()
        self._writing = self._thread.submit(self._write, snapshot)
        if not self._config.background:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether the checkpoint under way could not be written; `wait` then tells why."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Until the checkpoint under way, if any, is complete on all ranks; raises on all what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if not wait([writing], self._timeout).done:
            raise TimeoutError(f"the checkpoint in {self._folder} is not written after {self._timeout:.0f} s")
        writing.result()

    def close(self) -> None:
        """Let the checkpoint under way be finished, however the run ends: steps that are done should not be lost."""
        try:
            self.wait()
        except Exception as error:  # the run is ending for another reason, which is the one to tell
            print(f"[hotbunk] the last checkpoint was not written: {error}", file=sys.stderr)

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        checkpoint.write(self._folder, snapshot, self._group)
        with agreed("checkpoint (tidy)", self._group):
            checkpoint.drop_later(self._folder, snapshot.step)
            checkpoint.prune(self._folder, self._config.keep, self._config.keep_best, self._config.best_metric)


def check_best_metric(config: CheckpointConfig, step: int, metrics: dict[str, float]) -> None:
    """Raise UserError when checkpoints are to be kept by a figure that the run does not have.

    Figures of evaluations (eval/…) are missing in steps without one, and only in those.
    """
    name = config.best_metric.removeprefix("-")
    expected = not name.startswith("eval/") or any(key.startswith("eval/") for key in metrics)
    if config.keep_best and metrics and expected and name not in metrics:
        group = [key for key in metrics if key.partition("/")[0] == name.partition("/")[0]]
        there = ", ".join(sorted(group or metrics)[:12])
        raise UserError(f"checkpoint.best_metric: step {step} has no figure {name!r}; there are {there}")
