"""Weights by broadcast: every trainer rank gathers, and rank 0 sends to all workers of all engines,
by NCCL or gloo.

For engines on other devices than the trainer's, which join a group. Rank 0 speaks to their workers
over its store.
"""

import functools
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

import msgspec
import torch
from torch.distributed import Work

from sharding.ranks import agreed, exchange, rank
from sharding.report import AdapterFormat, SyncReport, SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import WeightSource
from sharding.tenants import VersionedPolicy
from sharding.transports.base import Transport
from sharding.transports.delta import Delta, LastSent
from sharding.update import Update
from sharding.verify import Probe
from sharding.wire.channel import SyncError
from sharding.wire.group import BroadcastGroup, GroupError, GroupStore, StoreChannel, listen, wait_until
from sharding.wire.manifest import Manifest, manifest_of
from sharding.wire.staging import STAMP_BYTES, local_buffers, with_stamp
from sharding.workers import Link, Workers, futures, raise_if_failed

TRAIN_WORLD_SIZE = 1
"""Members of the group on the trainer's side: its rank 0."""


def engine_ranks(engines: int, workers_per_engine: int) -> tuple[int, list[int]]:
    """Return the world size of the weights group, and the rank of each engine's first worker in it.
    Two engines of two workers make a world of 5 with the engines at ranks 1 and 3.
    """
    if engines < 1 or workers_per_engine < 1:
        raise ValueError(
            f"a weights group needs engines with workers, not {engines} with {workers_per_engine} each"
        )
    offsets = [TRAIN_WORLD_SIZE + engine * workers_per_engine for engine in range(engines)]
    return TRAIN_WORLD_SIZE + engines * workers_per_engine, offsets


class Broadcast(Transport):
    """A transport by broadcast in a group of rank 0 and all workers. Rank 0 calls `listen`, engines
    call `init_collective` on their workers, and `meet` waits for these. `ip`, `port`, `world_size`:
    arguments of `init_collective`, valid once `listen` has returned. `store`: on rank 0, the store
    of the group, which may not be complete yet. `lost`: why there is no group.
    """

    reader = "broadcast"
    cuts = True
    survives = True

    def __init__(
        self,
        device: torch.device,
        workers: int,
        timeout: float,
        ip: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Prepare a group. `workers` is the number of workers in all engines together. By default
        rank 0 listens on loopback, at a free port.
        """
        self.buffers: list[torch.Tensor] = []
        self.world_size, _ = engine_ranks(1, workers)
        self.ip = ip
        self.port = port
        self.store: GroupStore | None = None
        self.lost = "no engine has joined yet: connect() comes first"
        self._device = device
        self._timeout = timeout
        self._own_port = port
        self._group: BroadcastGroup | None = None
        self._works: dict[int, Work] = {}

    def listen(self) -> None:
        """Serve the store of a new group on rank 0. Collective."""
        with agreed("listening for engines"):
            if rank() == 0:
                store = listen(self.ip, self._own_port, self._timeout)
                self.port = int(store.port)
                self.store = GroupStore(store, f"{self.ip}:{store.port}")
                sizes = {"world_size": self.world_size, "train_world_size": TRAIN_WORLD_SIZE}
                self.store.put("group", msgspec.msgpack.encode({"token": secrets.token_hex(8), **sizes}))
        self.ip, self.port = exchange([self.ip, self.port])[0]

    def meet(self, calls: Sequence["Future[Any]"]) -> None:
        """Wait on rank 0 for all workers to join, or for one of the engines' `calls` to fail.
        Collective.
        Raises RemoteError: on all ranks; it names the missing worker, or the culprit and the fault.
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
            member = f"worker for weights rank {number}"
            wait_until(functools.partial(store.has, key), self._timeout, member, look)
            self._check_member(number, msgspec.msgpack.decode(store.read(key)))
        store.put("go", b"1")
        self._group = BroadcastGroup(store, 0, self.world_size, self._device, self.ip, self._timeout)

    def _check_member(self, number: int, member: dict[str, Any]) -> None:
        if member["device"] != self._device.type:
            raise SyncError(
                f"weights rank {number} is on {member['device']}, the trainer on {self._device.type}"
            )
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html: a
        # device can have one rank
        if self._device.type == "cuda":
            device_uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            if member["device_id"] == device_uuid:
                raise SyncError(
                    f"weights rank {number} shares the trainer's GPU {device_uuid}, and NCCL cannot "
                    "join two processes on one: send staged weights there"
                )

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Make the buffers for a plan's buckets. Raises SyncError where there is no group."""
        self.buffers = local_buffers(self.buffers, with_stamp(plan.capacity), self._device)
        if rank() == 0 and self._group is None:
            raise SyncError(
                f"there is no weights group to send through ({self.lost}): make a new CollectiveSender "
                "and let the engines join it with init_collective"
            )

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Start the broadcast of a filled buffer, unless the update has failed."""
        number = fields["buffer"]
        if self._group is not None and not failed:
            filled = self.buffers[number][: fields["nbytes"] + STAMP_BYTES]
            self._works[number] = self._group.start(filled)
        return {"capacity": self.buffers[0].nbytes}

    def wait(self, buffer: int) -> None:
        """Wait for the broadcast of a buffer to end. Raises GroupError: a member was lost, or gave
        up.
        """
        if self._group is not None and (work := self._works.pop(buffer, None)) is not None:
            self._group.wait(work, "broadcast of a bucket")

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Send one weight to all workers, for a call of their `update_weight`. `stream`: the one
        that has made it. Raises GroupError: a member was lost, or gave up.
        """
        if src != 0 or self._group is None:
            raise GroupError(
                f"rank 0 alone sends, not rank {src}" if src else f"there is no group: {self.lost}"
            )
        if stream is not None:
            stream.synchronize()
        self._group.broadcast(tensor.detach().to(self._device).contiguous(), "broadcast of a weight")

    def finish(self, release: bool) -> None:
        """Wait for all broadcasts. Raises GroupError: one of them does not end, in an update that
        broke off.
        """
        for buffer in [*self._works]:
            self.wait(buffer)
        self.buffers = []

    def leave(self, reason: str) -> None:
        """Wait for the broadcasts under way, and keep the group for the next update. End it if a
        broadcast does not end.
        """
        try:
            self.finish(release=True)
        except SyncError as lost:
            self.abort(str(lost))

    def abort(self, reason: str) -> None:
        """End the group, since its members may be in different broadcasts; its store says why."""
        self.lost = self.lost if self._group is None else reason
        self.buffers = []
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
    """Return the trainer's end of a group that workers join with `init_weight_update_group`. The
    group uses NCCL on a GPU and gloo on the CPU. Call its `broadcast` for each `update_weight` of
    theirs; `abort` ends the group. Return when all `world_size` - 1 workers have joined. Raises
    ValueError: a `rank` other than 0; RemoteError: after `timeout` seconds, naming who is missing.
    """
    if rank != 0:
        raise ValueError(
            f"rank {rank} is a worker's, which joins with init_weight_update_group: here is rank 0's end"
        )
    if device is None:
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
    group = Broadcast(device, world_size - 1, timeout, master_address or "127.0.0.1", int(master_port))
    group.listen()
    group.meet(())
    return group


class CollectiveSender:
    """The trainer's end for engines on other devices, which join a group by themselves. All ranks,
    or a single plain process, make the same calls:

        sender = CollectiveSender(source, device, settings, workers=2)
        # Each engine is called with `init_collective(rank_prefix, sender.ip, sender.port, ...)`.
        sender.connect(joining)               # the futures of these calls
        # Each engine is called with `update_weights_from_collective`.
        report = sender.send(version, calls)  # the futures of these calls
        sender.close()

    Weights are verified as by the sharding manager. Those of an iterator (`StreamSource`) cannot be
    verified, since they are gone once they are sent.

    Attributes: ip, port, world_size, train_world_size: arguments of the engines' `init_collective`.
        session: the number of the latest update.
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
        """Listen on `host`, by default loopback, for the `workers` of all engines together.
        `adapter`: the format, if the weights are the factors of an adapter. `session`: the latest
        one of an earlier sender, some of whose workers join this one.
        """
        self.session = session
        self._timeout = settings.timeout
        self._broadcast = Broadcast(device, workers, settings.timeout, host, port)
        self._broadcast.listen()
        transport: Transport = self._broadcast
        if settings.delta:
            transport = Delta(transport, LastSent("workers have joined or left" if session else ""))
        self._update = Update(source, transport, settings, adapter)
        self.ip = self._broadcast.ip
        self.port = self._broadcast.port
        self.world_size = self._broadcast.world_size
        self.train_world_size = TRAIN_WORLD_SIZE
        store = self._broadcast.store
        numbers = range(TRAIN_WORLD_SIZE, self.world_size)
        self._channels = (
            {} if store is None else {n: StoreChannel(store, f"to/{n}", f"from/{n}") for n in numbers}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def use(self, source: WeightSource) -> None:
        """Send the weights of this source from the next update on. All ranks must call it."""
        self._update.use(source)

    def refit_info(self) -> Manifest:
        """Return the weights of every update: checkpoint name -> [shape, dtype]; for the engines'
        `prepare_refit_info`.
        """
        return manifest_of(self._update.parameters)

    def connect(self, calls: Sequence[Any] = ()) -> None:
        """Wait for all workers to join. `calls`: futures, or Ray's ObjectRefs; otherwise as
        `Broadcast.meet`.
        """
        self._broadcast.meet(futures(calls))

    def send(self, version: int, calls: Sequence[Any] = ()) -> SyncReport:
        """Update all engines to `version`, and verify that they hold it. Collective over the
        trainer's ranks. `calls`: the engines' calls of `update_weights_from_collective`, already
        under way. The update waits for them, and ends at once if one fails. Raises RemoteError on
        all ranks, naming the worker and the weight. After wrong weights, the next `send` is enough;
        after the loss of a worker, a new sender and a new `init_collective` are needed.
        """
        report = SyncReport(version)
        start = time.perf_counter()
        running = futures(calls)
        self.session += 1
        links = [
            Link(
                channel,
                self.session,
                self._timeout,
                lambda: raise_if_failed(running),
                f"weights rank {number}",
            )
            for number, channel in self._channels.items()
        ]
        self._update.run(report, Workers(*links), session=self.session, calls=running)
        report.seconds["sync"] = time.perf_counter() - start
        return report

    def probe(self, policy: VersionedPolicy) -> Probe | None:
        """Draw a probe for the latest update, if nothing else could verify it; else None.
        Collective.
        """
        return self._update.probe(policy)

    def close(self) -> None:
        """Leave the group and stop listening; safe to call twice."""
        self._broadcast.abort("the sender was closed")
        self._channels = {}
        self._broadcast.store = None
