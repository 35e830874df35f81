"""Weights, and what is to be done with them, from the ranks that train to engines on ranks that only generate.

Rank 0 says through the run's store what comes next, and the weights follow by broadcast (`sharding.apart.broadcast`).
Which order comes when is a function of the step: nothing is queued, and nothing is decided by who is faster.
"""

import math
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from generation.engine.engine import Engine, Leader
from sharding.apart.broadcast import TRAIN_WORLD_SIZE, CollectiveSender
from sharding.ranks import EVERYBODY, exchange, is_main, rank
from sharding.send.probe import Probe, Tenant, VersionedPolicy, compare_with, draw_probe, vocabulary_of
from sharding.send.push import AdapterFormat, SyncReport, SyncSettings
from sharding.send.source import WeightSource
from sharding.wire.channel import SyncError
from sharding.wire.group import GroupStore, StoreChannel


def _line(store: dist.Store, number: int, outwards: bool) -> StoreChannel:
    """One end of the conversation of rank 0 with rank `number` of the run."""
    there, back = f"apart/to/{number}", f"apart/from/{number}"
    boxes = (there, back) if outwards else (back, there)
    return StoreChannel(GroupStore(store, "the run's store"), *boxes)


class _Half:
    """A rank's half of an update, as `CollectiveSender` asks the future of an engine's call about it."""

    def __init__(self, line: StoreChannel, number: int, timeout: float) -> None:
        self._line, self._number, self._timeout = line, number, timeout
        self._told: dict[str, Any] | None = None

    def done(self) -> bool:
        return self._told is not None or self._line.waiting()

    def exception(self) -> Exception | None:
        self._told = self._told or self._line.receive(self._timeout, f"answer of rank {self._number}, which generates")
        error = self._told.get("error")
        return SyncError(f"rank {self._number}, which generates: {error}") if error else None

    def result(self, timeout: float | None = None) -> None:
        if error := self.exception():
            raise error


class EnginesApart:
    """The engines as ranks that train know them; in the place of a `ShardingManager`.
    `report`: on the latest update, of which a shift may have none.
    `then`: called once when the shift is over and nothing has failed, before the policy changes.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        settings: SyncSettings,
        ranks: range,
        store: dist.Store,
        host: str = "127.0.0.1",
        adapter: AdapterFormat | None = None,
    ) -> None:
        """`ranks`: those that generate, by their numbers in the run, each with a worker. Collective among the others,
        of which rank 0 listens on `host`. `adapter`: `source` has the factors of one.
        """
        self._settings, self._ranks = settings, ranks
        self._lines = [_line(store, number, outwards=True) for number in ranks] if is_main() else []
        self._new_sender = partial(CollectiveSender, source, device, settings, adapter=adapter)
        self._sender = self._new_sender(len(ranks), host)
        self._vocabulary = vocabulary_of(source.parameters()) if adapter is None else adapter.vocabulary
        self._policy: VersionedPolicy | None = None
        self.report = SyncReport(version=-1)
        self.then: Callable[[], None] | None = None

    def _halves(self) -> list[Any]:
        timeout = self._settings.timeout
        return [_Half(line, number, timeout) for line, number in zip(self._lines, self._ranks, strict=False)]

    def connect(self) -> None:
        """Have all workers join the group of rank 0. Collective among all ranks of the run."""
        exchange([self._sender.ip, self._sender.port, self._sender.world_size], among=EVERYBODY)
        halves = self._halves()
        self._sender.connect(halves)
        for half in halves:
            half.result()

    @contextmanager
    def generation_shift(self, policy: VersionedPolicy, *others: Tenant) -> Iterator[None]:
        """Inside, orders (`begin`) bring this policy's weights. There is nothing to make room for."""
        self._policy, self.report = policy, SyncReport(policy.version)
        yield
        self.sleep()

    def begin(self, kind: str, **order: Any) -> int:
        """Order something of the engines, and bring them the policy's weights, verified. Collective among the ranks
        that train; returns the version, which is the only one that the order may be carried out with.
        """
        policy = self._policy
        assert policy is not None
        for line in self._lines:
            line.send(kind, version=policy.version, **order)
        self.report = self._bring(policy.version)
        probe: Probe | None = None
        if self._settings.verify != "off" and not self.report.verified:
            probe = draw_probe(policy, self._vocabulary)
            self.report.verified = "probe"
        for line in self._lines:
            line.send("probe", probe=probe)
        return policy.version

    def _bring(self, version: int) -> SyncReport:
        return self._sender.send(version, self._halves())

    def sleep(self) -> None:
        """The shift is over; engines apart stay awake."""
        then, self.then = self.then, None
        if then is not None:
            then()

    def close(self) -> None:
        """Let the engines' ranks leave; never raises."""
        for line in self._lines:
            with suppress(SyncError):  # the store has gone, and with it they
                line.send("end", failed=sys.exception() is not None)
        self._sender.close()


class TrainersApart:
    """The ranks that train as a rank knows them that only generates."""

    def __init__(self, leader: Leader | None, store: dist.Store, number: int, settings: SyncSettings) -> None:
        """`number`: this rank's in the run."""
        self._leader, self._settings = leader, settings
        self._line = _line(store, number, outwards=False)

    def connect(self) -> None:
        """Have this engine's workers join the group of rank 0. Collective among all ranks of the run."""
        ip, port, world_size = exchange(None, among=EVERYBODY)[0]
        place = (rank(), ip, port, world_size, TRAIN_WORLD_SIZE, self._settings.timeout)
        self._half("joining the weights group", lambda engine: engine.ask_workers("init_collective", *place))

    def hear(self) -> dict[str, Any]:
        """The next order: its `kind`, the `version` of the weights that follow, and what else `begin` was given."""
        return self._line.receive(math.inf, "order of the ranks that train")

    def receive(self, version: int) -> None:
        """Have the engine hold weights of this version, and no others, or raise."""
        self._take(version)
        timeout = self._settings.timeout
        probe = self._line.receive(timeout, "probe of the weights")["probe"]
        if probe is not None and self._leader is not None:
            compare_with(self._leader, probe, timeout)

    def _take(self, version: int) -> None:
        method, timeout = "update_weights_from_collective", self._settings.timeout
        self._half("receiving weights", lambda engine: engine.receive(method, timeout, version=version))

    def _half(self, what: str, action: Callable[[Engine], Coroutine[Any, Any, Any]]) -> None:
        """This rank's half of what rank 0 waits for; its error goes there, too."""
        try:
            if self._leader is not None:
                self._leader.thread.run(action(self._leader.engine), self._settings.timeout, what)
        except Exception as error:
            self._line.send("done", error=f"{type(error).__name__}: {error}")
            raise
        self._line.send("done")
