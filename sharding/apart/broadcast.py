"""Weights for engines that stand apart from the trainer: packed broadcasts, under the rules of the colocated path.

Every trainer rank gathers, rank 0 broadcasts. Source, plan, manifest, loader and receiver are those of the sharding
manager; what differs is that one sender serves many workers, and that a bucket is broadcast where it would be mapped.
Weights travel whole, however large: to be verified they pass through the workers' loaders a second time.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import msgspec
import torch
from torch.distributed import Work

from sharding.apart.group import Board, BoardChannel, BroadcastGroup, GroupError, listen, until
from sharding.ranks import agree, agreed, all_gather_bytes, rank
from sharding.send.plan import BucketPlan
from sharding.send.push import Link, Nobody, SyncReport, SyncSettings, announce, different_weights, push
from sharding.send.source import WeightSource
from sharding.send.verify import parameters_to_verify
from sharding.wire.channel import SyncError
from sharding.wire.manifest import Manifest, manifest_of, some
from sharding.wire.staging import BUFFERS, STAMP_BYTES, LocalStaging

TRAIN_WORLD_SIZE = 1
"""Members of the group on the trainer's side: its rank 0."""


def engine_ranks(engines: int, workers_per_engine: int) -> tuple[int, list[int]]:
    """World size of the weights group, and the rank of each engine's first worker in it.

    Two engines of two workers make a world of 5 with the engines at ranks 1 and 3.
    """
    if engines < 1 or workers_per_engine < 1:
        raise ValueError(f"a weights group needs engines with workers, not {engines} with {workers_per_engine} each")
    offsets = [TRAIN_WORLD_SIZE + engine * workers_per_engine for engine in range(engines)]
    return TRAIN_WORLD_SIZE + engines * workers_per_engine, offsets


class Workers:
    """All workers of all engines as one `Peer`; a failure of one is a failure of all, under its name."""

    def __init__(
        self, channels: list[BoardChannel], group: BroadcastGroup, staging: LocalStaging, session: int, timeout: float,
        still_alive: Callable[[], None],
    ) -> None:  # fmt: skip
        names = [f"weights rank {number}" for number in range(TRAIN_WORLD_SIZE, TRAIN_WORLD_SIZE + len(channels))]
        self._links = [
            Link(channel, session, timeout, still_alive, name) for channel, name in zip(channels, names, strict=True)
        ]
        self._names, self._channels, self._session, self._timeout = names, channels, session, timeout
        self._group, self._staging, self._still_alive = group, staging, still_alive
        self._works: list[tuple[int, Work]] = []
        self._broadcast_error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """See `Peer`."""
        return self._broadcast_error or next((link.error for link in self._links if link.error), None)

    @property
    def messages(self) -> int:
        """Sent so far, to all workers."""
        return sum(link.messages for link in self._links)

    def post(self, kind: str, **fields: Any) -> None:
        """See `Peer`. A bucket's broadcast starts behind its announcement."""
        if self.error is not None:
            return
        for link in self._links:
            link.post(kind, **fields)
        if "nbytes" in fields and self.error is None:
            memory = self._staging.buffers[fields["buffer"]][: fields["nbytes"] + STAMP_BYTES]
            try:
                self._works.append((fields["stamp"], self._group.start(memory)))
            except GroupError as error:
                self._broadcast_error = error

    def collect(self) -> dict[str, Any]:
        """See `Peer`. What workers found different is told with their names."""
        if self.error is not None:
            return {}
        self._finish_broadcast()
        answers = [link.collect() for link in self._links]
        different = [
            f"{name} (on {who})" for who, a in zip(self._names, answers, strict=True) for name in a.get("different", [])
        ]
        return {"plain": any(answer.get("plain", False) for answer in answers), "different": different}

    def _finish_broadcast(self) -> None:
        if not self._works:
            return
        stamp, work = self._works.pop(0)
        try:
            self._group.wait(work, f"broadcast of bucket {stamp}", self._still_alive)
        except Exception as error:
            self._broadcast_error = error

    def abort(self, reason: str) -> bool:
        """Let all workers leave the update; whether they did, and the group can be used again.

        It cannot when a worker was lost. One that failed and said so still is where it should be.
        """
        if self._broadcast_error or any(link.error and not link.ended for link in self._links):
            return False
        self._broadcast_error = SyncError(reason)
        try:
            for channel in self._channels:
                channel.send("abort", session=self._session, reason=reason)
            while self._works:
                self._group.wait(self._works.pop(0)[1], "last broadcast", lambda: None)
            for channel, name in zip(self._channels, self._names, strict=True):
                while not channel.receive(self._timeout, f"farewell from {name}").get("left"):
                    pass  # answers that nobody waits for any more
        except (SyncError, TimeoutError):
            return False
        return True


class CollectiveSender:
    """The trainer's end. Every rank constructs it and calls it alike; a single plain process does, too.

    Attributes:
        ip, port, world_size, train_world_size: what `init_collective` of the engines is told.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        settings: SyncSettings,
        workers: int,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Listen on `host` for `workers` workers, all engines together; loopback unless told otherwise."""
        self.world_size, _ = engine_ranks(1, workers)
        self.train_world_size = TRAIN_WORLD_SIZE
        self.ip = host
        self._source, self._device, self._settings = source, device, settings
        self._parameters = source.parameters()
        self._plan = BucketPlan(self._parameters, settings.bucket_bytes)
        self._session, self._stamps = 0, itertools.count(1)
        self._board: Board | None = None
        self._group: BroadcastGroup | None = None
        self._lost = "no engine has joined yet: connect() comes first"
        with agreed("listening for engines"):
            own_port = self._listen(port) if rank() == 0 else 0
        self.port = int(all_gather_bytes(str(own_port).encode())[0])

    def _listen(self, port: int) -> int:
        store = listen(self.ip, port, self._settings.timeout)
        self._board = Board(store, f"{self.ip}:{store.port}")
        workers = range(self.train_world_size, self.world_size)
        self._channels = [BoardChannel(self._board, f"to/{number}", f"from/{number}") for number in workers]
        group = {"token": secrets.token_hex(8), "world_size": self.world_size, "train_world_size": TRAIN_WORLD_SIZE}
        self._board.put("group", msgspec.msgpack.encode(group))
        return int(store.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refit_info(self) -> Manifest:
        """What every update brings: checkpoint name -> [shape, dtype]; for the engines' `prepare_refit_info`."""
        return manifest_of(self._parameters)

    def connect(self, calls: Sequence["Future[Any]"] = ()) -> None:
        """Wait for all workers to join.

        Args:
            calls: the engines' `init_collective` calls; when one fails, the wait is over.

        Raises:
            RemoteError: on all ranks; it names who is missing, or what is wrong with whom.
        """
        with agreed("connecting the engines"):
            if self._board is not None:
                self._meet(self._board, lambda: _raise_if_failed(calls))

    def _meet(self, board: Board, still_alive: Callable[[], None]) -> None:
        def look() -> None:
            still_alive()
            board.check_alarm()

        try:
            for number in range(self.train_world_size, self.world_size):
                key = f"member/{number}"
                until(lambda key=key: board.has(key), self._settings.timeout, f"worker for weights rank {number}", look)  # type: ignore[misc]
                self._check_member(number, msgspec.msgpack.decode(board.read(key)))
            board.put("go", b"1")
            timeout = self._settings.timeout
            self._group = BroadcastGroup(board, 0, self.world_size, self._device, self.ip, timeout)
        except Exception as error:
            board.raise_alarm(f"the trainer gave up: {error}")
            self._lost = str(error)
            raise

    def _check_member(self, number: int, member: dict[str, Any]) -> None:
        if member["device"] != self._device.type:
            raise SyncError(f"weights rank {number} is on {member['device']}, the trainer on {self._device.type}")
        if self._device.type == "cuda":
            own = str(torch.cuda.get_device_properties(self._device).uuid)
            if member["device_id"] == own:
                raise SyncError(f"weights rank {number} shares the trainer's GPU {own}: use the ShardingManager there")

    def send(self, version: int, calls: Sequence["Future[Any]"] = ()) -> SyncReport:
        """Bring all engines to `version`, and verify that they hold it. Collective over the trainer's ranks.

        Args:
            calls: the engines' `update_weights_from_collective` calls, which run already. They are waited for; one that
                fails early ends the update at once.

        Raises:
            RemoteError: on all ranks, naming the worker and the weight. When the weights were wrong, the next `send`
                repairs it; when a worker was lost, a new sender and a new `init_collective` are needed, and it says so.
        """
        report, start = SyncReport(version), time.perf_counter()
        with agreed("starting the update"):
            staging = LocalStaging(self._plan.capacity, self._device)
            peer = self._peer(staging, calls)
        try:
            self._update(peer, staging, report)
        except BaseException as error:
            self._give_up(peer, error)
            raise
        with agreed("the engines' end of the update"):
            for call in calls:
                call.result(self._settings.timeout)
        report.seconds["sync"] = time.perf_counter() - start
        return report

    def close(self) -> None:
        """Leave the group and stop listening; safe to call twice."""
        if self._group is not None:
            self._group.close()
        self._group = self._board = None
        self._channels = []
        self._lost = "the sender was closed"

    def _peer(self, staging: LocalStaging, calls: Sequence["Future[Any]"]) -> Workers | Nobody:
        self._session += 1
        if rank() != 0:
            return Nobody()
        if self._group is None:
            raise SyncError(
                f"there is no weights group to send through ({self._lost}): make a new CollectiveSender and let the "
                "engines join it with init_collective"
            )
        timeout = self._settings.timeout
        return Workers(self._channels, self._group, staging, self._session, timeout, lambda: _raise_if_failed(calls))

    def _update(self, peer: Workers | Nobody, staging: LocalStaging, report: SyncReport) -> None:
        answer = announce(peer, self._parameters, report.version, self._settings.replay)
        push(self._source, self._plan, staging, peer, "bucket", self._stamps)
        peer.post("finish")
        peer.collect()
        agree(peer.error, "sending weights")
        report.nbytes, report.staging_bytes = self._plan.nbytes, BUFFERS * self._plan.capacity
        if self._settings.verify != "off" and any(all_gather_bytes(b"plain" if answer.get("plain") else b"")):
            self._verify(peer, staging, report)
        peer.post("end")
        peer.collect()
        agree(peer.error, "ending the update")
        report.messages = peer.messages

    def _verify(self, peer: Workers | Nobody, staging: LocalStaging, report: SyncReport) -> None:
        """Send weights again, for the workers to compare with what they hold; where they are kept as they are sent."""
        parameters = parameters_to_verify(self._parameters, self._settings.verify, report.version)
        plan = BucketPlan(parameters, self._plan.capacity)  # they may be packed otherwise than among all
        different = different_weights(push(self._source, plan, staging, peer, "compare", self._stamps))
        error = peer.error or (
            SyncError(f"engines do not hold what was sent: {some(different)} differ") if different else None
        )
        agree(error, "verifying weights")
        report.nbytes += plan.nbytes
        report.verified = self._settings.verify

    def _give_up(self, peer: Workers | Nobody, error: BaseException) -> None:
        """Get the workers out of the update; close the group when that fails, since nobody knows where they are."""
        if not isinstance(peer, Workers) or self._board is None or self._group is None:
            return
        reason = str(peer.error or error)
        if not peer.abort(reason):
            self._lost = f"lost in the update before: {reason}"
            self._board.raise_alarm(f"the trainer gave up: {reason}")
            self._group.close()
            self._group = None


def _raise_if_failed(calls: Sequence["Future[Any]"]) -> None:
    """Raise when an engine's call has ended with an error: nobody will answer for that engine."""
    for call in calls:
        if call.done() and (error := call.exception()) is not None:
            raise SyncError(f"an engine's call failed: {type(error).__name__}: {error}") from error
