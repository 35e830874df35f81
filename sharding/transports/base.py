"""The interface of all transports, the trainer's half: `Transport`, and `Transfer`, the part of an
update that it sees.

Engines on the trainer's devices read its staging buffers (`staged`), share its weights
(`zero_copy`) or read its shards (`pull`). `sharding.remote` has the transports that need no common
memory: `Broadcast` and `Storage`.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from sharding.report import SyncReport
from sharding.send.buckets import BucketPlan
from sharding.send.source import ShardedSource
from sharding.wire.manifest import SourceParameter

WorkerCall = Callable[..., "Future[list[dict[str, Any]]]"]
"""(method, *arguments): starts a method of the worker extension on all workers of a leader's
engine; their outcomes.
"""


class Transfer(Protocol):
    """An update (`sharding.update.Update`), as the transport of its weights sees it.

    Attributes:
        parameters: the parameters to bring.
        session: the number of the update.
        report: about the update; a transport may note in it.
    """

    parameters: list[SourceParameter]
    session: int
    report: SyncReport

    def push_all(self) -> None:
        """Bring every parameter through buckets. Collective."""

    def push(self, parameters: list[SourceParameter], unsplit: Collection[str] | None) -> None:
        """Bring these parameters through buckets. Collective.

        Parameters that are larger than a bucket travel in parts, except weights in `unsplit`; None:
        all travel whole.
        """

    def needed_whole(self) -> set[str] | None:
        """Return the weights that the loaders of some worker need whole; None: all. Collective."""

    def post(self, kind: str, **fields: Any) -> None:
        """Send this rank's workers a message, whose answer is waited for at the end of the
        update.
        """


class Transport:
    """The trainer's half of a transport; the worker's is a `sharding.worker.receiver.Buckets`,
    named in `reader`.

    Every rank makes the same calls in the same order, and a subclass overrides those in which it
    differs:

        transport.connect(call)  # before the first update, and after one that broke off
        transport.transfer(update)  # unless overridden, brings all weights through buckets:
            transport.begin(version, plan, read)
            # Once a buffer is filled, before its message:
            where = transport.send("bucket", fields, failed)
            transport.wait(buffer)  # before the buffer is filled again
        transport.finish(release)  # or `abort`; `leave` if all workers left a broken update

    An error of one rank is raised there, and the ranks agree on it afterwards; the next update
    begins anew.

    Attributes: reader: the worker's half: "staged", "storage", or an import string. cuts: a weight
        larger than a bucket may travel in parts. shares: the engine's weights are, or will be, the
        trainer's too: they stay where they are while it sleeps. survives: the transport can be used
        again after a broken update that all workers have left in order. buffers: two (uint8), each
        of the plan's capacity and `STAMP_BYTES`, between `begin` and `finish`.
    """

    reader: str
    cuts: bool = False
    shares: bool = False
    survives: bool = False
    buffers: list[torch.Tensor]

    @classmethod
    def for_run(
        cls, device: torch.device, source: ShardedSource, policy: Any, folder: Path, timeout: float
    ) -> "Transport":
        """Build the transport of a run.

        Args:
            device: of this rank and its worker.
            source: the weights of `policy`, which is a `trainer.policy.Policy`.
            folder: the run's.
            timeout: of every wait, s.
        """
        raise NotImplementedError

    def connect(self, call: WorkerCall | None) -> None:
        """Prepare for updates. `call`: on leaders only."""

    def needs_proof(self, provable: bool) -> bool:
        """Return True if digests have to compare every weight of the next update, however few
        `sync.verify` draws.

        `provable`: they can. Called alike on all ranks, before the update is announced.
        """
        return False

    def transfer(self, update: Transfer) -> None:
        """Bring the weights of an update, or let workers read them. Collective."""
        update.push_all()

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Prepare the buffers for a plan's buckets. `read`: this rank's worker is going to read
        them.
        """
        raise NotImplementedError

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Offer the workers a bucket that `gather` has filled a buffer with.

        Args: kind: "bucket", or "compare" for weights that are sent again to be compared. fields:
            of its message: `buffer`, `nbytes`, `stamp`, and the weights in it (`pieces`,
            `stretches`). failed: this rank's worker gets no more messages.

        Returns further fields of the message, by which the worker finds the bucket.
        """
        raise NotImplementedError

    def wait(self, buffer: int) -> None:
        """Wait until a buffer may be filled again; this rank's worker has answered already."""

    def begins_again(self, wrong: str, failure: Exception | None) -> bool:
        """Return True if all weights have to be announced and brought once more, in the same
        update. Collective.

        Args: wrong: names this rank's workers that hold something else than was sent; "" if none
            does. failure: of these workers, or of the transport.
        """
        return False

    def finish(self, release: bool) -> None:
        """End an update, when every worker has everything. `release`: give the buffers back."""

    def leave(self, reason: str) -> None:
        """Leave an update that broke off, but that all workers have left in order; never raises."""
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Give up an update that broke off, or end with the run; never raises."""


def as_transport(way: Any) -> Transport:
    """Return a user's object as a `Transport`: itself, with the defaults of the members that its
    class lacks.
    """
    if not isinstance(way, Transport):
        way.__class__ = type(type(way).__name__, (type(way), Transport), {})
    transport: Transport = way
    return transport
