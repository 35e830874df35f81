"""The worker's end of the collective path: joining the group that weights are broadcast in, and receiving from it."""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed import Work

from sharding.apart.group import Board, BoardChannel, BroadcastGroup, GroupError, dial, own_address, until
from sharding.wire.channel import SyncError
from sharding.wire.staging import BUFFERS, STAMP_BYTES, stamped_bucket


@dataclass(frozen=True)
class Place:
    """Where a worker stands in a group: what `init_collective` was told, and the worker's own rank from it."""

    ip: str
    port: int
    world_size: int
    rank: int


class Membership:
    """A worker's membership in a group, from joining to `leave`.

    Attributes:
        token: tells this group from another at the same address.
    """

    def __init__(self, place: Place, device: torch.device, device_id: str, timeout: float) -> None:
        """Join. Returns when all members are there and a first broadcast has arrived.

        Raises:
            SyncError: the group is another one than was described, or this rank in it is taken.
            TimeoutError: not everybody came in time.
        """
        self.place = place
        self.board = Board(dial(place.ip, place.port, timeout), f"{place.ip}:{place.port}")
        self.channel = BoardChannel(self.board, f"from/{place.rank}", f"to/{place.rank}")
        try:
            self.token = self._claim(device, device_id)
            until(lambda: self.board.has("go"), timeout, "all members of the weights group", self.board.check_alarm)
            address = own_address(place.ip, place.port)
            self.group = BroadcastGroup(self.board, place.rank, place.world_size, device, address, timeout)
        except Exception as error:
            with suppress(GroupError):
                if not self.board.has("go"):  # a stray cannot end a group that stands already
                    self.board.raise_alarm(f"weights rank {place.rank} (pid {os.getpid()}) could not join: {error}")
            raise

    def _claim(self, device: torch.device, device_id: str) -> bytes:
        rank, world_size = self.place.rank, self.place.world_size
        group = msgspec.msgpack.decode(self.board.read("group"))
        if group["world_size"] != world_size or not group["train_world_size"] <= rank < world_size:
            raise SyncError(
                f"rank {rank} of {world_size} does not belong to the trainer's weights group, which has "
                f"{group['train_world_size']} trainer and {group['world_size'] - group['train_world_size']} workers"
            )
        own = msgspec.msgpack.encode({"pid": os.getpid(), "device": device.type, "device_id": device_id})
        if (holder := self.board.claim(f"member/{rank}", own)) != own:
            pid = msgspec.msgpack.decode(holder)["pid"]
            raise SyncError(f"rank {rank} of the weights group is taken by pid {pid}: engines need different prefixes")
        return str(group["token"]).encode()

    def stands(self, place: Place) -> bool:
        """Whether this is a membership in the group that `place` describes, and the group can be used."""
        try:
            self.board.check_alarm()
            now = msgspec.msgpack.decode(Board(dial(place.ip, place.port, 1.0), "").read("group"))
        except (SyncError, TimeoutError):
            return False
        return place == self.place and str(now["token"]).encode() == self.token

    def leave(self, reason: str | None = None) -> None:
        """Leave the group; with a reason, everybody else has to, too."""
        with suppress(GroupError):
            if reason is not None:
                self.board.raise_alarm(reason)
        self.group.close()


class CollectiveCarrier:
    """An update by broadcast. While one bucket is loaded, the next one is received into the other buffer."""

    def __init__(self, membership: Membership, device: torch.device, timeout: float) -> None:
        self.lost: str | None = None  # why the group cannot be used any more
        self._membership, self._device, self._timeout = membership, device, timeout
        self._channel, self._group = membership.channel, membership.group
        self._buffers: list[torch.Tensor] = []
        self._ahead: deque[tuple[dict[str, Any], Work | None]] = deque()
        self._work: Work | None = None
        self._session = -1

    def next(self) -> dict[str, Any]:
        """See `Carrier`. A bucket's broadcast has begun when its message is returned."""
        message, self._work = self._ahead.popleft() if self._ahead else self._read()
        self._session = message["session"]
        return message

    def _read(self) -> tuple[dict[str, Any], Work | None]:
        message = self._channel.receive(self._timeout, "message from the trainer; is its send() running?")
        work = None
        if "nbytes" in message:
            self._allocate(message["handle"]["nbytes"])
            work = self._group.start(self._buffers[message["buffer"]][: message["nbytes"] + STAMP_BYTES])
        return message, work

    def _allocate(self, nbytes: int) -> None:
        """Buffers as large as the trainer's. On its type of device: gloo carries no device memory, NCCL no other."""
        if not self._buffers:
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]

    def answer(self, **fields: Any) -> None:
        """See `Carrier`."""
        self._channel.send("done", session=self._session, **fields)

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """See `Carrier`. The other buffer is free by now, so whatever was announced for it may already come."""
        self._finish(message)
        if self._channel.waiting():
            self._ahead.append(self._read())
        return stamped_bucket(self._buffers[message["buffer"]], message)

    def _finish(self, message: dict[str, Any]) -> None:
        if self._work is not None:
            self._group.wait(self._work, f"broadcast of bucket {message['stamp']}", lambda: None)

    def leave(self, message: dict[str, Any]) -> None:
        """See `Carrier`."""
        self._buffers = []
        self.answer(left=True)

    def fail(self, error: Exception) -> None:
        """See `Carrier`. Stays for what was announced, since a broadcast needs everybody, until the trainer gives up.

        Where the group itself is what failed, the others learn it through the alarm.
        """
        try:
            if isinstance(error, GroupError | TimeoutError):
                raise error
            self._channel.send("failed", session=self._session, error=f"{type(error).__name__}: {error}")
            while (message := self.next())["kind"] not in ("abort", "end"):
                self._finish(message)
            self.leave(message)
        except Exception as lost:
            self.lost = f"weights rank {self._membership.place.rank} (pid {os.getpid()}) gave up: {lost}"
            self._buffers = []
