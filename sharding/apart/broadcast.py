"""Weights by broadcast: every trainer rank gathers, and rank 0 sends to all workers of all engines, by NCCL or gloo.

For engines on other devices than the trainer's. `Broadcast` is the way of a recipe's own engines; a `CollectiveSender`
serves engines that somebody else has started, and speaks to their workers over the group's store.
"""

import itertools
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

import msgspec
import torch
from torch.distributed import Work

from sharding.ranks import agree, agreed, exchange, rank
from sharding.send.push import (
    AdapterFormat,
    Link,
    NullPeer,
    SyncReport,
    SyncSettings,
    announce,
    different_weights,
    futures,
    parameters_to_verify,
    push,
    raise_if_failed,
)
from sharding.send.source import WeightSource
from sharding.send.ways import BucketPlan, Call
from sharding.wire.channel import Look, SyncError
from sharding.wire.group import BroadcastGroup, GroupError, GroupStore, StoreChannel, listen, wait_until
from sharding.wire.manifest import Manifest, first_names, manifest_of
from sharding.wire.staging import BUFFERS, STAMP_BYTES, local_buffers, with_stamp

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


class Broadcast:
    """The group of rank 0 and all workers, and buckets broadcast in it. See `Way`.
    `ip`, `port`, `world_size`: arguments of the engines' `init_collective`, valid once `listen` has returned.
    `store`: on rank 0, of a group that stands or is forming.
    `lost`: why there is no group.
    """

    reader, cuts, in_place, shares = "broadcast", True, False, False

    def __init__(
        self, device: torch.device, workers: int, timeout: float, ip: str = "127.0.0.1", port: int = 0
    ) -> None:
        """For so many workers, all engines together; loopback, and a free port, unless told otherwise."""
        self.buffers: list[torch.Tensor] = []
        self.world_size, _ = engine_ranks(1, workers)
        self.ip, self.port = ip, port
        self.store: GroupStore | None = None
        self.lost = "no engine has joined yet: connect() comes first"
        self._device, self._timeout, self._own_port = device, timeout, port
        self._group: BroadcastGroup | None = None
        self._works: dict[int, Work] = {}

    def listen(self) -> None:
        """Have rank 0 serve the store of a new group; collective."""
        with agreed("listening for engines"):
            if rank() == 0:
                store = listen(self.ip, self._own_port, self._timeout)
                self.port, self.store = int(store.port), GroupStore(store, f"{self.ip}:{store.port}")
                sizes = {"world_size": self.world_size, "train_world_size": TRAIN_WORLD_SIZE}
                self.store.put("group", msgspec.msgpack.encode({"token": secrets.token_hex(8), **sizes}))
        self.ip, self.port = exchange([self.ip, self.port])[0]

    def meet(self, calls: Sequence["Future[Any]"]) -> None:
        """Have rank 0 wait for all workers to join; collective. When one of the engines' `calls` fails, that ends it.
        Raises RemoteError: on all ranks; it names who is missing, or what is wrong with whom.
        """
        with agreed("connecting the engines"):
            if self.store is None:
                return
            try:
                self._meet(self.store, calls)
            except Exception as error:
                self.lost = str(error)
                self.store.abort(f"the trainer gave up: {error}")
                raise

    def _meet(self, store: GroupStore, calls: Sequence["Future[Any]"]) -> None:
        def look() -> None:
            raise_if_failed(calls)
            store.check_aborted()

        for number in range(TRAIN_WORLD_SIZE, self.world_size):
            key = f"member/{number}"
            wait_until(lambda key=key: store.has(key), self._timeout, f"worker for weights rank {number}", look)  # type: ignore[misc]
            self._check_member(number, msgspec.msgpack.decode(store.read(key)))
        store.put("go", b"1")
        self._group = BroadcastGroup(store, 0, self.world_size, self._device, self.ip, self._timeout)

    def _check_member(self, number: int, member: dict[str, Any]) -> None:
        if member["device"] != self._device.type:
            raise SyncError(f"weights rank {number} is on {member['device']}, the trainer on {self._device.type}")
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html: a device can have one rank
        if self._device.type == "cuda":
            own = str(torch.cuda.get_device_properties(self._device).uuid)
            if member["device_id"] == own:
                raise SyncError(
                    f"weights rank {number} shares the trainer's GPU {own}, and NCCL cannot join two processes on one: "
                    "send staged weights there"
                )

    def connect(self, call: Call | None) -> None:
        """See `Way`. Every leader's engine joins; ranks and workers correspond one to one."""
        self.listen()
        calls = []
        if call is not None:
            place = (rank(), self.ip, self.port, self.world_size, TRAIN_WORLD_SIZE, self._timeout)
            calls = [call("init_collective", *place)]
        self.meet(calls)
        with agreed("joining the weights group"):
            for joined in calls:
                joined.result(self._timeout)

    def begin(self, version: int, plan: BucketPlan, read: bool = True) -> None:
        """Make the buffers for a plan's buckets. Raises SyncError where there is no group."""
        self.buffers = local_buffers(self.buffers, with_stamp(plan.capacity), self._device)
        if rank() == 0 and self._group is None:
            raise SyncError(
                f"there is no weights group to send through ({self.lost}): make a new CollectiveSender and let the "
                "engines join it with init_collective"
            )

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Start the broadcast of a filled buffer, unless the update has failed."""
        if self._group is not None and not failed:
            memory = self.buffers[fields["buffer"]][: fields["nbytes"] + STAMP_BYTES]
            self._works[fields["buffer"]] = self._group.start(memory)
        return {"capacity": self.buffers[0].nbytes}

    def wait(self, buffer: int) -> None:
        """See `Way`. Raises GroupError: a member was lost, or gave up."""
        if self._group is not None and (work := self._works.pop(buffer, None)) is not None:
            self._group.wait(work, "broadcast of a bucket")

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Send one weight to all workers, for a call of their `update_weight`. `stream`: the one that has made it.
        Raises GroupError: a member was lost, or gave up.
        """
        if src != 0 or self._group is None:
            raise GroupError(f"rank 0 alone sends, not rank {src}" if src else f"there is no group: {self.lost}")
        if stream is not None:
            stream.synchronize()
        self._group.broadcast(tensor.detach().to(self._device).contiguous(), "broadcast of a weight")

    def finish(self, release: bool) -> None:
        if release:
            self.buffers = []

    def abort(self, reason: str) -> None:
        """See `Way`. The group ends, since its members may be in different broadcasts; its store says why."""
        self.lost, self.buffers = reason, []
        self._works.clear()
        if self.store is not None:
            with suppress(GroupError):
                self.store.abort(f"the trainer gave up: {reason}")
        if self._group is not None:
            self._group.close()
            self._group = None


def stateless_init_process_group(
    master_address: str | None,
    master_port: int | str,
    rank: int,
    world_size: int,
    device: torch.device | None = None,
    timeout: float = 300.0,
) -> Broadcast:
    """The trainer's end of a group that workers join with `init_weight_update_group`: NCCL on a GPU, gloo on the CPU.
    `broadcast` goes with their `update_weight`, `abort` ends it. Returns when all `world_size` - 1 workers have joined.
    Raises ValueError: a `rank` other than 0; RemoteError: after `timeout` seconds, naming who is missing.
    """
    if rank != 0:
        raise ValueError(f"rank {rank} is a worker's, which joins with init_weight_update_group: here is rank 0's end")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    group = Broadcast(device, world_size - 1, timeout, master_address or "127.0.0.1", int(master_port))
    group.listen()
    group.meet(())
    return group


class Workers:
    """All workers of all engines as one `Peer` of rank 0; a failure of one is a failure of all, under its name."""

    def __init__(self, channels: list[StoreChannel], session: int, timeout: float, still_alive: Look) -> None:
        self._names = [f"weights rank {number}" for number in range(TRAIN_WORLD_SIZE, TRAIN_WORLD_SIZE + len(channels))]
        named = zip(channels, self._names, strict=True)
        self._links = [Link(channel, session, timeout, still_alive, name) for channel, name in named]
        self._channels, self._session, self._timeout = channels, session, timeout
        self._way_error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """See `Peer`; set where the way has failed."""
        return self._way_error or next((link.error for link in self._links if link.error), None)

    @error.setter
    def error(self, error: Exception | None) -> None:
        self._way_error = error

    @property
    def messages(self) -> int:
        """Sent so far, to all workers."""
        return sum(link.messages for link in self._links)

    def post(self, kind: str, **fields: Any) -> None:
        if self.error is None:
            for link in self._links:
                link.post(kind, **fields)

    def collect(self) -> dict[str, Any]:
        """See `Peer`. Weights that workers found different are named with them."""
        if self.error is not None:
            return {}
        answers = [link.collect() for link in self._links]
        named = zip(self._names, answers, strict=True)
        different = [f"{name} (on {who})" for who, answer in named for name in answer.get("different", [])]
        return {"plain": any(answer.get("plain", False) for answer in answers), "different": different}

    def abort(self, reason: str, way: Broadcast) -> bool:
        """Let all workers leave the update; whether they did, and the group can be used again.
        It cannot when a worker was lost. One that failed and said so still takes part in what was announced.
        """
        if self._way_error or any(link.error and not link.ended for link in self._links):
            return False
        try:
            for channel in self._channels:
                channel.send("abort", session=self._session, reason=reason)
            for buffer in range(BUFFERS):
                way.wait(buffer)
            for channel, name in zip(self._channels, self._names, strict=True):
                while not channel.receive(self._timeout, f"last message from {name}").get("left"):
                    pass  # answers to messages before the abort
        except (SyncError, TimeoutError):
            return False
        return True


class CollectiveSender:
    """The trainer's end for engines that join by themselves. All ranks, or a single plain process, call it alike.
    Weights are verified by passing through the workers' loaders a second time, except those of an iterator
    (`StreamSource`), which are gone by then.
    `ip`, `port`, `world_size`, `train_world_size`: arguments of the engines' `init_collective`.
    `session`: the number of the latest update.
    """

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        settings: SyncSettings,
        workers: int,
        host: str = "127.0.0.1",
        port: int = 0,
        adapter: AdapterFormat | None = None,
        session: int = 0,
    ) -> None:
        """Listen on `host` for `workers` workers, all engines together; loopback by default. `adapter`: weights are the
        factors of one. `session`: that of a sender before, some of whose workers join this one.
        """
        self._settings, self._adapter = settings, adapter
        self.use(source)
        self.session, self._stamps = session, itertools.count(1)
        self._way = Broadcast(device, workers, settings.timeout, host, port)
        self._way.listen()
        self.ip, self.port = self._way.ip, self._way.port
        self.world_size, self.train_world_size = self._way.world_size, TRAIN_WORLD_SIZE
        numbers = range(TRAIN_WORLD_SIZE, self.world_size) if self._way.store else ()
        self._channels = [StoreChannel(self._way.store, f"to/{n}", f"from/{n}") for n in numbers]  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def use(self, source: WeightSource) -> None:
        """Take weights from this source from the next update on; on all ranks."""
        self._source, self._parameters = source, source.parameters()
        self._plan = BucketPlan(self._parameters, self._settings.bucket_bytes)

    def refit_info(self) -> Manifest:
        """The weights of every update: checkpoint name -> [shape, dtype]; for the engines' `prepare_refit_info`."""
        return manifest_of(self._parameters)

    def connect(self, calls: Sequence[Any] = ()) -> None:
        """Wait for all workers to join. `calls`: futures, or Ray's ObjectRefs; otherwise as `Broadcast.meet`."""
        self._way.meet(futures(calls))

    def send(self, version: int, calls: Sequence[Any] = ()) -> SyncReport:
        """Bring all engines to `version`, and verify that they hold it. Collective over the trainer's ranks.
        `calls`: the engines' `update_weights_from_collective` calls, which run already. They are waited for; one that
        fails early ends the update at once.
        Raises RemoteError: on all ranks, naming the worker and the weight. When the weights were wrong, the next `send`
        repairs it; when a worker was lost, a new sender and a new `init_collective` are needed, and it says so.
        """
        report, start = SyncReport(version), time.perf_counter()
        running = futures(calls)
        self.session += 1
        with agreed("starting the update"):
            self._way.begin(version, self._plan)
        peer: Workers | NullPeer = NullPeer()
        if rank() == 0:
            peer = Workers(self._channels, self.session, self._settings.timeout, lambda: raise_if_failed(running))
        try:
            self._update(peer, report)
        except BaseException as error:
            reason = str(peer.error or error)
            if isinstance(peer, Workers) and peer.abort(reason, self._way):
                self._way.finish(release=True)
            else:
                self._way.abort(reason)
            raise
        with agreed("the engines' end of the update"):
            for call in running:
                call.result(self._settings.timeout)
        self._way.finish(release=True)
        report.seconds["sync"] = time.perf_counter() - start
        return report

    def _update(self, peer: Workers | NullPeer, report: SyncReport) -> None:
        # The session is a number that no adapter had before, so nothing cached by number or name can be an old one's.
        adapter = None if self._adapter is None else {"number": self.session, "config": self._adapter.config}
        answer = announce(peer, self._parameters, report.version, self._settings.replay, adapter)
        push(self._source, self._plan, self._way, peer, "bucket", self._stamps)
        peer.post("finish")
        peer.collect()
        agree(peer.error, "sending weights")
        report.nbytes, report.staging_bytes = self._plan.nbytes, BUFFERS * self._plan.capacity
        repeatable = getattr(self._source, "repeatable", True)
        if self._settings.verify != "off" and repeatable and any(exchange(bool(answer.get("plain")))):
            self._verify(peer, report)
        peer.post("end")
        peer.collect()
        agree(peer.error, "ending the update")
        report.messages = peer.messages

    def _verify(self, peer: Workers | NullPeer, report: SyncReport) -> None:
        """Send weights again, for the workers to compare with what they hold; where they are kept as they are sent."""
        parameters = parameters_to_verify(self._parameters, self._settings.verify, report.version)
        plan = BucketPlan(parameters, self._plan.capacity)  # they may be packed otherwise than among all
        different = different_weights(push(self._source, plan, self._way, peer, "compare", self._stamps))
        wrong = SyncError(f"engines do not hold what was sent: {first_names(different)} differ") if different else None
        agree(peer.error or wrong, "verifying weights")
        report.nbytes += plan.nbytes
        report.verified = self._settings.verify

    def close(self) -> None:
        """Leave the group and stop listening; safe to call twice."""
        self._way.abort("the sender was closed")
        self._channels, self._way.store = [], None
