"""What makes a run outlast its process: checkpoints when they are due, and one more when it is asked to leave.

SIGTERM on any rank, as clusters send it some time before they kill, is known to all ranks half a second later. They
agree on it at the end of the step, save and leave together. A step whose rollouts are still under way when half of
`checkpoint.grace_s` is over is given up, which leaves the policy as the step before did: every finished step is kept.
An update or an evaluation is finished; what takes longer than the grace period ends without saving again.
"""

import sys
import time
from dataclasses import asdict

from sharding.collectives import all_reduce_max, is_main
from trainer import lifetime
from trainer.assembly import RunState
from trainer.checkpoint import Parts
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import TrainConfig
from trainer.identity import Identity
from trainer.watchdog import Watchdog


class Keeper:
    """Saves a run, and ends it when it is asked to end."""

    def __init__(
        self, config: TrainConfig, watchdog: Watchdog, state: RunState, parts: Parts, identity: Identity
    ) -> None:
        """Collective. What is saved of the run is its `state` and the `parts` that learn, as they then are."""
        self._config, self._watchdog = config.checkpoint, watchdog
        self._state, self._parts, self._identity = state, parts, identity
        self._writer = CheckpointWriter(
            config.run.folder / "checkpoints", config.checkpoint, config.run.first_step_deadline_s
        )
        self._saved = state.step if config.checkpoint.resume == "auto" else 0
        self._metrics: dict[str, float] = {}

    def hold_sigterm(self) -> None:
        """From now on SIGTERM leaves time to save."""
        if self._config.grace_s:
            lifetime.hold_sigterm(self._config.grace_s, self._watchdog.call_all)

    def step_done(self, metrics: dict[str, float]) -> None:
        """After a step's row is written: save if it is time to, leave if any rank was asked to. Collective.

        Raises on all ranks when the checkpoint before could not be written.
        """
        self._metrics = metrics
        if self._config.every and self._state.step % self._config.every == 0:
            self.save()
        asked = float(self._watchdog.called_at is not None)
        found = all_reduce_max({"asked": asked, "failed": float(self._writer.failed)})
        if found["failed"]:
            self._writer.wait()
        if found["asked"]:
            self.leave()

    def save(self) -> None:
        """Begin a checkpoint of the run as it is now, if there is none of this step. Collective."""
        if self._saved != self._state.step:
            extra = {"state": asdict(self._state), "identity": self._identity}
            self._writer.save(self._state.step, self._parts, extra, self._metrics)
            self._saved = self._state.step

    def finish(self) -> None:
        """Save the run's end, and wait until it is written. Collective."""
        self.save()
        self._writer.wait()

    def leave(self) -> None:
        """Save, and end the run as SIGTERM would have done at once. Collective."""
        self.finish()
        if is_main():
            print(f"[hotbunk] asked to end: saved at step {self._state.step}", file=sys.stderr)
        lifetime.interrupt_now()

    def late_to_leave(self) -> bool:
        """Whether half of the grace period is over."""
        called = self._watchdog.called_at
        return called is not None and time.monotonic() - called > self._config.grace_s / 2

    def close(self) -> None:
        """Let a checkpoint under way be finished."""
        self._writer.close()
