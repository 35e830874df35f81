"""The same conversation as in `sharding.apart.crews`, where one rank holds all engines as replicas that come and go.

Before each update that rank says how many workers there are. Where they are others than before, all of them join a new
group; where one is lost while weights travel, the update begins again with those that are left.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from generation.engine.replicas import ReplicatedEngine, cluster_address
from sharding.apart.broadcast import TRAIN_WORLD_SIZE
from sharding.apart.crews import EnginesApart, TrainersApart
from sharding.ranks import RemoteError, agreed, exchange
from sharding.send.push import SyncReport
from sharding.wire.channel import SyncError
from sharding.wire.group import own_address


class ReplicasApart(EnginesApart):
    """See `EnginesApart`; `ranks` has the number of the one that holds the replicas."""

    def connect(self) -> None:
        """They join before they get weights."""

    def _bring(self, version: int) -> SyncReport:
        while True:
            told = self._hear("members")
            try:
                if told["joined"]:
                    self._gather(told["workers"], told["reached_from"])
                return self._sender.send(version, self._halves())
            except RemoteError:
                if not self._hear("settled")["again"]:
                    raise

    def _gather(self, workers: int, reached_from: str) -> None:
        """Have so many workers join a new group; `reached_from`: what they can be reached from, if not from here."""
        host, _, port = reached_from.rpartition(":")
        own = own_address(host, int(port)) if host else "127.0.0.1"
        self._sender.close()
        self._sender = self._new_sender(workers, own, session=self._sender.session)
        for line in self._lines:
            line.send("group", place=[self._sender.ip, self._sender.port, self._sender.world_size])
        halves = self._halves()
        self._sender.connect(halves)
        with agreed("joining the weights group"):
            for half in halves:
                half.result()

    def _hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind, past what was said of an update that has failed. Collective."""
        told: dict[str, Any] = {"kind": ""}
        with agreed("hearing of the replicas"):
            for line in self._lines:
                while told["kind"] != kind:
                    told = line.receive(math.inf, f"word of {kind} replicas")
                if error := told.get("error"):
                    raise SyncError(error)
        return exchange(told)[0]  # type: ignore[no-any-return]


class TrainersOfReplicas(TrainersApart):
    """See `TrainersApart`."""

    def connect(self) -> None:
        """See `ReplicasApart`."""

    def _take(self, version: int) -> None:
        assert self._leader is not None and isinstance(self._leader.engine, ReplicatedEngine)
        engine, timeout = self._leader.engine, self._settings.timeout
        while True:
            with self._telling("members") as told:
                told["joined"] = self._leader.thread.submit(engine.join()).result()
                told["workers"] = len(engine.members) * engine.settings.tensor_parallel_size
                told["reached_from"] = cluster_address()
            try:
                if told["joined"]:
                    place = self._line.receive(timeout, "place of the weights group")["place"]
                    group = (*place, TRAIN_WORLD_SIZE, timeout)
                    self._half("joining the weights group", lambda _: engine.join_group(*group))  # noqa: B023
                return super()._take(version)
            except Exception:
                with self._telling("settled") as told:
                    told["again"] = self._leader.thread.run(engine.settle(), timeout, "looking after the replicas")
                if not told["again"]:
                    raise

    @contextmanager
    def _telling(self, kind: str) -> Iterator[dict[str, Any]]:
        """Tell rank 0 what the block has found out, or its error."""
        told: dict[str, Any] = {}
        try:
            yield told
        except Exception as error:
            self._line.send(kind, error=f"{type(error).__name__}: {error}")
            raise
        self._line.send(kind, **told)
