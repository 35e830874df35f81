"""Starts engines again that have died, in their place: what they were asked for is asked anew, and the run goes on.

Three ways were weighed. Every call could say by its exception that an engine has died; but one death shows as many
errors: a lost connection, an update that broke off, a deadline, on this rank or another. A thread could watch engines
and mend them behind a step's back, which then would not know what it still has. So whatever failure ends a generation
shift comes to one place, `after`, which asks every engine whether it lives. A reader of the loop sees one `except`, and
everything that follows from a death is here and in `ShardingManager.restart`.

An `Engine` is started again in its own object, so that rollouts, server and carried episodes still hold the right one.
What has not been trained is sampled anew, with the same seeds: the run ends as if nothing had happened.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from generation.engine.engine import Leader
from generation.engine.vllm_compat import killed_at_start
from sharding.manager import ShardingManager, Tenant
from sharding.ranks import RemoteError, agreed, exchange
from trainer.config.schema import TrainConfig
from trainer.distributed import say
from trainer.engines import start_engine
from trainer.rollouts.pool import StepAbandoned
from trainer.run.watchdog import Watchdog

_HOUR = 3600.0
_ASK_SECONDS = 15.0  # more than `Engine.death` takes
_CAUSES_TOLD = 4


class EngineRestarts:
    """Counts the deaths of all engines, alike on all ranks, and starts the dead again while there are few.

    Attributes:
        sharding: set once there is one, before `after` is called.
    """

    sharding: ShardingManager

    def __init__(self, config: TrainConfig, device: torch.device, watchdog: Watchdog) -> None:
        self._config, self._device, self._watchdog = config, device, watchdog
        self._leader: Leader | None = None
        self._deaths: list[tuple[float, str]] = []  # when, by rank 0's clock (s), and which

    def first_start(self) -> Leader | None:
        """This rank's engine, if it leads one. Collective; one whose core is killed meanwhile is started again.

        Raises RemoteError where one does not start for another reason.
        """
        while True:
            try:
                with agreed("starting the engine"):
                    self._leader = self._leader or start_engine(self._config, self._device.type == "cuda")
                return self._leader
            except RemoteError as failure:
                killed = killed_at_start(failure.__cause__)
                self._count("it was killed while it started" if killed else "", failure)

    def after(self, failure: RemoteError, *tenants: Tenant, may_leave: bool = False) -> None:
        """Have all engines alive and asleep again after a failure of which they are the cause. Collective.

        `tenants` are those of the shift. With `may_leave`, nothing is started where any rank was asked to end: then
        StepAbandoned is raised. Raises `failure` if no engine has died, RemoteError if too many have or the policy's
        weights have gone with one.
        """
        with self._watchdog.aside("starting the engine again", self._config.run.first_step_deadline_s):
            while True:
                self._count(self._death(), failure)
                if self._config.sync.way == "zero_copy" and self._device.type == "cuda":
                    lost = "with sync.way zero_copy the policy's weights have gone with the engine"
                    raise RemoteError(f"{lost}: {failure}")
                if may_leave and any(exchange(self._watchdog.called_at is not None)):
                    self.sharding.sleep()
                    raise StepAbandoned("an engine has died, and the run is asked to end")
                try:
                    self.sharding.restart(self._start_again, *tenants)
                    break
                except RemoteError as another:
                    failure = another

    def _death(self) -> str:
        """How this rank's engine has died, if it leads one that has. Its processes are gone then."""
        if self._leader is None:
            return ""
        died = ""
        with suppress(Exception):  # a loop that hangs gives no answer
            died = self._leader.thread.run(self._leader.engine.death(), _ASK_SECONDS, "asking the engine")
        if died:
            self._leader.engine.close()
        return died

    def _start_again(self) -> None:
        if self._leader is not None and self._leader.engine.is_closed:
            self._leader.start_again(self._config.engine.start_timeout_s)

    def _count(self, death: str, failure: RemoteError) -> None:
        """Note all ranks' deaths. Raises `failure` if there is none, RemoteError if there were too many in an hour."""
        try:
            told: Sequence[tuple[str, float]] = exchange([death, time.monotonic()])
        except RuntimeError:  # it was a rank that has died
            raise failure  # noqa: B904 - as it was, with its cause
        now = told[0][1]
        new = [f"the engine of rank {rank}: {how}" for rank, (how, _) in enumerate(told) if how]
        if not new:
            raise failure
        self._deaths = [(at, which) for at, which in self._deaths if now - at < _HOUR] + [(now, which) for which in new]
        allowed = self._config.engine.restarts
        if len(self._deaths) > allowed:
            last = "; ".join(which for _, which in self._deaths[-_CAUSES_TOLD:])
            raise RemoteError(
                f"{len(self._deaths)} engines have died within an hour, more than engine.restarts={allowed} allows "
                f"({last}); {failure}"
            ) from failure
        left = allowed - len(self._deaths)
        say(f"{' and '.join(new)}: starting again, {left} of engine.restarts left in this hour")
