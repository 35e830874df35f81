"""Patches in place of buckets (`sync.delta`): a transport around another, and its record of the
weights last sent.

Rank 0 keeps a copy of all weights in the engine's dtype in host memory. Digests of blocks would
need hardly any, but could name only blocks, all of which change (`sharding.wire.patches`). A worker
keeps no copy: it reads the former content of a bucket back out of its weights
(`sharding.worker.patched`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from sharding.ranks import agree, exchange, rank
from sharding.report import SyncReport
from sharding.send.buckets import BucketPlan
from sharding.transports.base import Transfer, Transport, WorkerCall
from sharding.wire.manifest import SourceParameter, first_names
from sharding.wire.patches import patch_between
from sharding.wire.staging import STAMP_BYTES, stamp


class Delta(Transport):
    """A transport around another one. It sends only the words of 2 bytes that have changed since
    the last update.

    Every weight is digested in such an update: a wrong word would otherwise stay wrong as long as
    the trainer does not change it. If a worker turns out to hold other weights, all weights are
    sent in full within the same update.
    """

    def __init__(self, transport: Transport, last_sent: "LastSent") -> None:
        """Send patches by `transport`, whose workers must read them with
        `sharding.worker.patched.PatchedBuckets`.
        """
        self.last_sent = last_sent
        self.reader = transport.reader
        self.cuts = transport.cuts
        self.shares = transport.shares
        self.survives = transport.survives
        self.buffers = []
        self._transport = transport
        self._patching = False
        self._report = SyncReport(version=-1)

    def connect(self, call: WorkerCall | None) -> None:
        """Prepare the transport inside for updates."""
        self._transport.connect(call)

    def needs_proof(self, provable: bool) -> bool:
        """Return `provable`: this update sends patches if digests can prove its result. Otherwise
        it sends everything, and the record of what was sent is dropped.
        """
        self._patching = provable
        if not provable:
            self.last_sent.forget("digests did not compare all weights of the update before")
        return provable

    def transfer(self, update: Transfer) -> None:
        """Send all weights. Weights that some worker needs whole come first, so that few buckets
        have both these and patched ones.
        """
        if not self._patching:
            self._transport.transfer(update)
            return
        self._report = update.report
        unsplit = update.needed_whole()
        parameters = update.parameters
        self.last_sent.begin(parameters, unsplit)
        update.report.unpatched = self.last_sent.unpatched
        if unsplit:
            parameters = sorted(
                parameters, key=lambda p: unsplit.isdisjoint(piece.name for piece in p.pieces)
            )
        update.push(parameters, unsplit if self.cuts else None)
        update.report.spared += self.last_sent.spared

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Prepare the transport inside, whose buffers are filled directly."""
        self._transport.begin(version, plan, read)
        self.buffers = self._transport.buffers

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Send a bucket; on rank 0, send a patch in its place if there is a smaller one."""
        buffer = self.buffers[fields["buffer"]]
        patch = None
        if self._patching and kind == "bucket" and rank() == 0 and not failed:
            patch = self.last_sent.replace(buffer[: fields["nbytes"]], fields)
        if patch is None:
            return self._transport.send(kind, fields, failed)
        buffer[: patch.nbytes].copy_(patch)
        stamp(buffer[: patch.nbytes + STAMP_BYTES], fields["stamp"])
        where = self._transport.send(kind, fields | {"nbytes": patch.nbytes}, failed)
        return where | {"patch": patch.nbytes}

    def wait(self, buffer: int) -> None:
        """Wait until the transport inside allows the buffer to be filled again."""
        self._transport.wait(buffer)

    def begins_again(self, wrong: str, failure: Exception | None) -> bool:
        """Return True if a worker of any rank holds wrong weights after patches, so that all
        weights have to be sent in full. Collective.
        """
        if not self._patching:
            return False
        agree(failure, "verifying weights")
        if not any(exchange(bool(wrong and self.last_sent.spared))):
            return False
        self.last_sent.forget(wrong)
        return True

    def finish(self, release: bool) -> None:
        """End an update: all workers hold the weights that were sent."""
        self._transport.finish(release)
        self.buffers = []
        if self._patching:
            self._report.resent = self.last_sent.commit()

    def leave(self, reason: str) -> None:
        """Drop the record of what was sent, and leave the broken update."""
        self.last_sent.forget("the update before broke off")
        self._transport.leave(reason)
        self.buffers = []

    def abort(self, reason: str) -> None:
        """Drop the record of what was sent, and give up the update or the run."""
        self.last_sent.forget("the update before broke off")
        self._transport.abort(reason)
        self.buffers = []


class LastSent:
    """The weights as they were last sent. All ranks have one, and rank 0 alone fills it.

    Buckets that are sent outside of `begin` and `commit` are neither patched nor recorded.

    Attributes: spared: bytes that patches have saved in this update; 0: everything was sent.
        unpatched: a sentence about the weights that always travel whole, "" if they are less than 1
        % of the bytes.
    """

    def __init__(self, reason: str = "") -> None:
        """Begin without a record. `reason`: why there is none although workers have been sent
        weights before.
        """
        self.spared = 0
        self.unpatched = ""
        self._unrecorded: set[str] = set()  # weights that some worker cannot read back
        self._sizes: dict[str, int] = {}  # bytes of the weights to record in this update
        self._bytes: dict[str, Tensor] = {}  # the weights themselves
        self._current: set[str] = set()  # those that all workers hold
        self._reason = reason

    def begin(self, parameters: list[SourceParameter], unrecorded: set[str] | None) -> None:
        """Prepare for an update. `unrecorded`: weights that some worker cannot read back; None: all
        of them.
        """
        if unrecorded is None:
            self.forget("a worker has no record yet of where its weights go")
        else:
            self._unrecorded = unrecorded
        self.spared = 0
        sizes = {piece.name: piece.nbytes for parameter in parameters for piece in parameter.pieces}
        self._sizes = {name: nbytes for name, nbytes in sizes.items() if name not in self._unrecorded}
        patched = sum(self._sizes.values())
        percent = round(100 - 100 * patched / max(sum(sizes.values()), 1))
        self.unpatched = ""
        if percent > 0:
            names = first_names(sorted(sizes.keys() - self._sizes.keys()))
            self.unpatched = (
                f"{percent} % of the bytes cannot be patched, since engines re-process {names}"
            )
        self._bytes = {
            name: memory
            for name, memory in self._bytes.items()
            if self._sizes.get(name) == memory.nbytes
        }
        self._current &= self._bytes.keys()

    def replace(self, bucket: Tensor, fields: dict[str, Any]) -> Tensor | None:
        """Record a bucket, uint8 [nbytes], and return the patch that leads to it; None: it has to
        be sent whole.

        `fields` are those of its message.
        """
        stretches = [
            (name, dtype, 0, math.prod(shape), offset) for name, dtype, shape, offset in fields["pieces"]
        ]
        stretches += fields["stretches"]
        former = None  # the bucket's content as workers hold it; padding does not change
        if any(name in self._current for name, *_ in stretches):
            former = bucket.clone()
        for name, dtype, first, count, offset in stretches:
            width = getattr(torch, dtype).itemsize
            memory = bucket[offset:][: count * width]
            if former is not None and name not in self._current:  # a patch has to change all of it
                torch.bitwise_not(memory, out=former[offset:][: count * width])
            if name not in self._sizes:
                continue
            if name not in self._bytes:
                self._bytes[name] = torch.empty(self._sizes[name], dtype=torch.uint8)
            record = self._bytes[name][first * width :][: count * width]
            if former is not None and name in self._current:
                former[offset:][: count * width] = record
            record.copy_(memory)
        patch = None if former is None else patch_between(former, bucket)
        if patch is not None:
            self.spared += bucket.nbytes - patch.nbytes
        return patch

    def commit(self) -> str:
        """Note that all workers hold the weights sent. Return why all were sent again, or "" if
        they were not.
        """
        self._current = set(self._bytes)
        self._sizes = {}
        reason = self._reason
        self._reason = ""
        return reason

    def forget(self, reason: str) -> None:
        """Send everything in the next update. The first `reason` is reported, if there was anything
        to patch.
        """
        if self._current:
            self._reason = self._reason or reason
        self._current = set()
        self._sizes = {}
