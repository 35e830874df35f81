"""A worker's end of updates by broadcast: it joins the group in which the trainer broadcasts
weights, and receives them.
"""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed import Work

from sharding.wire.channel import SyncError
from sharding.wire.group import (
    BroadcastGroup,
    GroupError,
    GroupStore,
    StoreChannel,
    own_address,
    wait_until,
)
from sharding.wire.staging import STAMP_BYTES, local_buffers, stamped_bucket
from sharding.worker.patched import PatchedBuckets
from sharding.worker.receiver import ChannelCarrier


@dataclass(frozen=True)
class Rendezvous:
    """A worker's place in a group: the arguments of `init_collective`, and the worker's own rank
    that follows from them.
    """

    ip: str
    port: int
    world_size: int
    rank: int


class Membership:
    """A worker's membership in a group, which lasts until `leave`. `token` distinguishes the group
    from earlier and later ones at the same address.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, device_id: str, timeout: float
    ) -> None:
        """Join the group. Return when all members are there and a first broadcast has arrived.
        Raises SyncError if the trainer's group does not have this rank or this size, or if another
        process has the rank. Raises TimeoutError if not all members came in time.
        """
        self.rendezvous = rendezvous
        self.store = GroupStore.at(rendezvous.ip, rendezvous.port, timeout)
        self.channel = StoreChannel(self.store, f"from/{rendezvous.rank}", f"to/{rendezvous.rank}")
        try:
            self.token = self._claim(device, device_id)
            everybody = "all members of the weights group"
            wait_until(lambda: self.store.has("go"), timeout, everybody, self.store.check_aborted)
            address = own_address(rendezvous.ip, rendezvous.port)
            self.group = BroadcastGroup(
                self.store, rendezvous.rank, rendezvous.world_size, device, address, timeout
            )
        except Exception as error:
            with suppress(GroupError):
                if not self.store.has("go"):  # a late process must not end a complete group
                    self.store.abort(
                        f"weights rank {rendezvous.rank} (pid {os.getpid()}) could not join: {error}"
                    )
            raise

    def _claim(self, device: torch.device, device_id: str) -> bytes:
        rank = self.rendezvous.rank
        world_size = self.rendezvous.world_size
        group = msgspec.msgpack.decode(self.store.read("group"))
        if group["world_size"] != world_size or not group["train_world_size"] <= rank < world_size:
            raise SyncError(
                f"rank {rank} of {world_size} does not belong to the trainer's weights group, which "
                f"has {group['train_world_size']} trainer and "
                f"{group['world_size'] - group['train_world_size']} workers"
            )
        claim = msgspec.msgpack.encode(
            {"pid": os.getpid(), "device": device.type, "device_id": device_id}
        )
        if (holder := self.store.claim(f"member/{rank}", claim)) != claim:
            pid = msgspec.msgpack.decode(holder)["pid"]
            raise SyncError(
                f"rank {rank} of the weights group is taken by pid {pid}: engines need different "
                "prefixes"
            )
        return str(group["token"]).encode()

    def stands(self, rendezvous: Rendezvous) -> bool:
        """Return True if this is a membership in the group that `rendezvous` describes, and the
        group can be used.
        """
        try:
            self.store.check_aborted()
            now = msgspec.msgpack.decode(
                GroupStore.at(rendezvous.ip, rendezvous.port, 1.0).read("group")
            )
        except (SyncError, TimeoutError):
            return False
        return rendezvous == self.rendezvous and str(now["token"]).encode() == self.token

    def leave(self, reason: str | None = None) -> None:
        """Leave the group. With a `reason`, end it for all members, who see the reason in their
        errors.
        """
        with suppress(GroupError):
            if reason is not None:
                self.store.abort(reason)
        self.group.close()


class BroadcastBuckets:
    """The buffers in which a worker receives the buckets of `sharding.remote.broadcast.Broadcast`:
    two, as the trainer has, so that one fills while the other is loaded.
    """

    ahead = True
    opened = closed = 0

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._buffers: list[torch.Tensor] = []
        self._works: deque[Work] = deque()

    @property
    def _group(self) -> BroadcastGroup:
        membership: Membership | None = self._worker.hotbunk_membership
        if membership is None:
            raise SyncError("in no weights group: init_collective comes first")
        return membership.group

    def expect(self, message: dict[str, Any]) -> None:
        """Begin to receive the bucket that `message` announces, in the buffer that it names. The
        bucket that was in this buffer has been loaded.
        """
        # The buffers are where the group's backend receives: in host memory for gloo, in device
        # memory for NCCL.
        self._buffers = local_buffers(self._buffers, message["capacity"], self._worker.device)
        memory = self._buffers[message["buffer"]][: message["nbytes"] + STAMP_BYTES]
        self._works.append(self._group.start(memory))

    def finish(self, message: dict[str, Any]) -> None:
        """Wait until the oldest broadcast under way, which is that of the bucket in `message`, is
        over.
        """
        self._group.wait(self._works.popleft(), f"broadcast of bucket {message['stamp']}")

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Wait for the bucket that `message` announced, and return its bytes. Raises SyncError if
        the buffer holds another bucket.
        """
        self.finish(message)
        return stamped_bucket(self._buffers[message["buffer"]], message)

    def close(self, reason: str | None = None) -> None:
        """Release the buffers. With a `reason`, leave the group and end it for all members, since
        they may wait for this one in a broadcast.
        """
        self._buffers = []
        self._works.clear()
        membership = self._worker.hotbunk_membership
        if reason is not None and membership is not None:
            self._worker.hotbunk_membership = None
            membership.leave(
                f"weights rank {membership.rendezvous.rank} (pid {os.getpid()}) gave up: {reason}"
            )


class CollectiveCarrier(ChannelCarrier):
    """The worker's end of an update by broadcast. Messages come through the group's store, and
    buckets by broadcast.
    """

    def __init__(self, worker: Any, membership: Membership, timeout: float) -> None:
        self._broadcasts = BroadcastBuckets(worker)
        buckets = PatchedBuckets(self._broadcasts, worker)
        super().__init__(membership.channel, buckets, "the trainer; is its send() running?")
        self.start(None, timeout)

    def leave(self, message: dict[str, Any]) -> None:
        """Answer that this worker has left the update. It stays in the group, also after an update
        that failed.
        """
        self._broadcasts.close()
        self.answer(left=True)

    def fail(self, error: Exception) -> None:
        """Tell the trainer of the failure, and join announced broadcasts until it gives up, since a
        broadcast needs everybody. If the group itself has failed, the other members learn it from
        the store.
        """
        try:
            if isinstance(error, GroupError | TimeoutError):
                raise error
            self._channel.send("failed", session=self._session, error=f"{type(error).__name__}: {error}")
            while (message := self.next())["kind"] not in ("abort", "end"):
                if "stamp" in message:
                    self._broadcasts.finish(message)
            self.leave(message)
        except Exception as lost:
            self._broadcasts.close(str(lost))
