"""Restart dead engines in place; their requests are sent again with the same seeds, and the run
continues.

Three designs were considered. Each call could report an engine's death by its exception; but one
death causes many different errors (a lost connection, an interrupted update, an exceeded deadline),
on this rank or another one. A thread could watch engines and repair them while a step runs; but
then the step would not know which of its answers it still has. So every failure that ends a
generation shift goes to one method, `after`, which asks every engine whether it is alive. The
training loop has a single `except`, and the rest is here and in `ShardingManager.restart`.

A restarted engine keeps its `Engine` object, so rollouts, the server and carried episodes need not
replace it. Answers that have not been trained on are sampled again with the same seeds, so the run
ends as if no engine had died.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from generation.engine.engine import Leader
from generation.engine.vllm_compat import killed_at_start
from sharding.manager import ShardingManager
from sharding.ranks import RemoteError, agreed, exchange
from sharding.tenants import Tenant
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import way
from trainer.distributed import say
from trainer.engines import put_to_sleep, start_engine
from trainer.rollouts.pool import StepAbandoned
from trainer.run.watchdog import Watchdog

_HOUR = 3600.0
_ASK_SECONDS = 15.0  # more than `Engine.death` takes
_CAUSES_TOLD = 4


class EngineRestarts:
    """Counts the deaths of all engines, identically on all ranks, and restarts dead engines up to a
    limit per hour.

    Attributes:
        sharding: the sharding manager, which is set before `after` is called.
    """

    sharding: ShardingManager

    def __init__(self, config: TrainConfig, device: torch.device, watchdog: Watchdog) -> None:
        self._config = config
        self._device = device
        self._watchdog = watchdog
        self._leader: Leader | None = None
        self._deaths: list[tuple[float, str]] = []  # time by rank 0's clock (s), and a description

    def first_start(self) -> Leader | None:
        """Start this rank's engine, if it leads one, and return it asleep. Collective.

        An engine whose core is killed during its start, or that dies before it sleeps, is started
        again. Raises RemoteError on other failures.
        """
        while True:
            try:
                with agreed("starting the engine"):
                    self._leader = self._leader or start_engine(
                        self._config, self._device.type == "cuda"
                    )
                    self._start_again()
                with agreed("putting the engine to sleep"):
                    put_to_sleep(self._leader, self._config.engine.start_timeout_s)
                return self._leader
            except RemoteError as failure:
                killed = killed_at_start(failure.__cause__)
                self._count("it was killed while it started" if killed else self._death(), failure)

    def after(self, failure: RemoteError, *tenants: Tenant, may_leave: bool = False) -> None:
        """Restart dead engines after a failed generation shift, and return with all engines asleep.
        Collective.

        Args: failure: the error that ended the shift. tenants: the tenants of the shift. may_leave:
            if true and some rank was asked to end, restart nothing and raise StepAbandoned.

        Raises: RemoteError: `failure` itself if no engine has died; another one if too many have
            died, or if the policy's weights were lost with an engine.
        """
        with self._watchdog.aside("starting the engine again", self._config.run.first_step_deadline_s):
            while True:
                self._count(self._death(), failure)
                if way(self._config).shares_memory and self._device.type == "cuda":
                    lost = (
                        f"with sync.way: {self._config.sync.way}, the policy's weights were lost with "
                        "the engine"
                    )
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
        """Describe how this rank's engine has died and close it; "" if it is alive or this rank
        leads none.
        """
        if self._leader is None:
            return ""
        died = ""
        with suppress(Exception):  # an event loop that hangs does not answer
            died = self._leader.thread.run(
                self._leader.engine.death(), _ASK_SECONDS, "asking the engine"
            )
        if died:
            self._leader.engine.close()
        return died

    def _start_again(self) -> None:
        if self._leader is not None and self._leader.engine.is_closed:
            self._leader.start_again(self._config.engine.start_timeout_s)

    def _count(self, death: str, failure: RemoteError) -> None:
        """Record all ranks' deaths. Raises `failure` if there is none, RemoteError if there were
        too many in an hour.

        `death` describes the death of this rank's engine; "" if it is alive.
        """
        try:
            reports: Sequence[tuple[str, float]] = exchange([death, time.monotonic()])
        except RuntimeError:  # a rank has died, not an engine
            raise failure  # noqa: B904 - the original error, with its cause
        now = reports[0][1]
        new = [
            f"the engine of rank {rank}: {reason}" for rank, (reason, _) in enumerate(reports) if reason
        ]
        if not new:
            raise failure
        self._deaths = [(at, which) for at, which in self._deaths if now - at < _HOUR]
        self._deaths += [(now, which) for which in new]
        allowed = self._config.engine.restarts
        if len(self._deaths) > allowed:
            last = "; ".join(which for _, which in self._deaths[-_CAUSES_TOLD:])
            raise RemoteError(
                f"{len(self._deaths)} engines have died within an hour, more than "
                f"engine.restarts={allowed} allows ({last}); {failure}"
            ) from failure
        left = allowed - len(self._deaths)
        say(f"{' and '.join(new)}: starting again, {left} of engine.restarts left in this hour")
