"""The ways that bring the bytes of weights from the ranks to the workers (`sync.way`), and the plan of buckets.

Parameters are cut into buckets in the same way on every rank, since only names and shapes decide.
Engines on the trainer's devices read the trainer's staging buffers (`Staged`), share its weights (`ZeroCopy`), or read
its shards (`sharding.send.pull`). `sharding.apart` has the ways that need no common memory: `Broadcast` and `Storage`.
"""

import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sharding.wire.channel import SyncError
from sharding.wire.manifest import Piece, SourceParameter, Stretch
from sharding.wire.staging import Staging, make_staging, open_memory, wait_for_writes, with_stamp

WorkerCall = Callable[..., "Future[list[dict[str, Any]]]"]
"""(method, *arguments): starts a method of the worker extension on all workers of a leader's engine; their outcomes."""

ALIGNMENT = 512
"""Bytes. Every parameter starts on such a boundary, so that any dtype and any vectorised copy can start there."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket, in bytes; or that of a part of it: the same stretch of every shard.
    `offset`: from the start of the bucket.
    `nbytes`: of all shards' stretches together, which follow one another.
    `start`: from the start of each shard.
    """

    parameter: SourceParameter
    offset: int
    nbytes: int
    start: int = 0

    @property
    def whole(self) -> bool:
        """True if all of the parameter is here."""
        return self.nbytes == self.parameter.nbytes

    def stretches(self) -> Iterator[Stretch]:
        """Return the elements of the checkpoint's tensors that lie here; padding is left out.
        Of [8, 64] float32 from two shards of 1024 bytes, the part with `start` 512 and 1024 bytes holds elements 128
        to 255 and 384 to 511.
        """
        shard, length = self.parameter.nbytes // self.parameter.shards, self.nbytes // self.parameter.shards
        for number in range(self.parameter.shards):
            begin, offset = number * shard + self.start, self.offset + number * length
            for piece in self.parameter.pieces:
                first, last = max(begin, piece.offset), min(begin + length, piece.offset + piece.nbytes)
                if first < last:
                    at, count = (first - piece.offset) // piece.itemsize, (last - first) // piece.itemsize
                    yield Stretch(piece.name, piece.dtype, at, count, offset + first - begin)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together, and parts of larger ones."""

    slots: tuple[Slot, ...]
    nbytes: int

    def pieces(self) -> list[Piece]:
        """Return every checkpoint tensor that is whole in the bucket, with its byte offset in the
        bucket.
        """
        slots = [slot for slot in self.slots if slot.whole]
        return [Piece(p.name, p.dtype, p.shape, s.offset + p.offset) for s in slots for p in s.parameter.pieces]

    def stretches(self) -> list[Stretch]:
        """Return the elements of the other tensors in the bucket."""
        return [stretch for slot in self.slots if not slot.whole for stretch in slot.stretches()]


class BucketPlan:
    """Parameters in order, cut into buckets of at most `bucket_bytes`.

    One that is larger travels in parts, if it may, and has a bucket to itself otherwise. A part is the same stretch of
    every rank's shard rather than some rows of the parameter: so each rank gives equally much of its own to each part,
    and the gather of a part puts it into its place, as that of a parameter does.
    `parameters`: in the order in which they are sent.
    `capacity`: bytes of the largest bucket, and so of each staging buffer.
    """

    def __init__(
        self, parameters: list[SourceParameter], bucket_bytes: int, unsplit: Collection[str] | None = None
    ) -> None:
        """Cut the buckets. A parameter may travel in parts if it holds none of the checkpoint tensors in `unsplit`, and
        `unsplit` is not None.
        """
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"a bucket of {bucket_bytes} bytes is smaller than the alignment of {ALIGNMENT}")
        self.parameters = parameters
        self.buckets: list[Bucket] = []
        slots: list[Slot] = []
        end = 0
        for parameter, start, nbytes in _parts(parameters, bucket_bytes, unsplit):
            size = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
            if slots and end + size > bucket_bytes:
                self.buckets.append(Bucket(tuple(slots), end))
                slots, end = [], 0
            slots.append(Slot(parameter, end, nbytes, start))
            end += size
        if slots:
            self.buckets.append(Bucket(tuple(slots), end))
        self.capacity = max((b.nbytes for b in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, padding included."""
        return sum(b.nbytes for b in self.buckets)


def _parts(
    parameters: list[SourceParameter], bucket_bytes: int, unsplit: Collection[str] | None
) -> Iterator[tuple[SourceParameter, int, int]]:
    """Yield each parameter with the `start` and `nbytes` of its slots."""
    for parameter in parameters:
        shard = step = parameter.nbytes // parameter.shards
        if parameter.nbytes > bucket_bytes and _may_be_split(parameter, unsplit):
            step = max(bucket_bytes // parameter.shards // ALIGNMENT, 1) * ALIGNMENT
        for start in range(0, shard, step) if shard else [0]:
            yield parameter, start, parameter.shards * min(step, shard - start)


def _may_be_split(parameter: SourceParameter, unsplit: Collection[str] | None) -> bool:
    return unsplit is not None and not any(piece.name in unsplit for piece in parameter.pieces)


class Transfer(Protocol):
    """The interface of an update (`sharding.update.Update`) to the way that brings its weights.

    Attributes:
        parameters: what has to be brought.
        session: the number of the update.
    """

    parameters: list[SourceParameter]
    session: int

    def push_all(self) -> None:
        """Bring every parameter through buckets. Collective."""

    def push(self, parameters: list[SourceParameter], unsplit: Collection[str] | None) -> None:
        """Bring these parameters through buckets, in parts where they are larger, except for weights in `unsplit`; with
        None all weights travel whole. Collective.
        """

    def needed_whole(self) -> set[str] | None:
        """Return the weights that the loaders of some worker need whole; None: all. Collective."""

    def post(self, kind: str, **fields: Any) -> None:
        """Send this rank's workers a message, whose answer is waited for at the end of the update."""


class Way(Protocol):
    """The trainer's half of a way; the worker's is a `sharding.worker.receiver.Buckets`.

    Every rank makes the same calls in the same order. An error of one rank is raised there, and the ranks agree on it
    afterwards; after any error comes `abort`, and the next update begins anew.

    Three members are optional:
    `transfer(update: Transfer)` brings the weights of an update; without it they go through buckets (`push_all`).
    `survives`: an update that broke off ends with `finish`, not with `abort`, if all workers have left it in order.
    `last_sent`: a `sharding.apart.last_sent.LastSent`, on all ranks, if buckets may be patches of it.

    Attributes:
        reader: the worker's half: "staged", "storage", or an import string.
        cuts: a weight larger than a bucket may travel in parts.
        shares: the engine's weights are, or will be, the trainer's too: they stay where they are while it sleeps.
        buffers: two (uint8), each of the plan's capacity and `STAMP_BYTES`, between `begin` and `finish`.
    """

    reader: str
    cuts: bool
    shares: bool
    buffers: list[torch.Tensor]

    def connect(self, call: WorkerCall | None) -> None:
        """Prepare; called before the first update, and again after one that broke off. `call`: on leaders only."""
        return

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Prepare the buffers of an update. `read`: this rank's worker is going to read them."""

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Offer the workers a bucket that `gather` has filled a buffer with.
        `kind`: "bucket", or "compare" for weights that are sent again to be compared.
        `fields`: of its message: `buffer`, `nbytes`, `stamp`, and what it holds (`pieces`, `stretches`).
        `failed`: this rank's worker gets no more messages.

        Returns further fields of the message: where the worker finds the bucket.
        """

    def wait(self, buffer: int) -> None:
        """Return when a buffer may be filled again; this rank's worker has answered already."""
        return

    def finish(self, release: bool) -> None:
        """End an update, when every worker has everything. `release`: give the buffers back."""

    def abort(self, reason: str) -> None:
        """Give up an update that broke off, or end with the run; never raises."""


class Staged(Way):
    """A `Way` through memory that the rank and its worker, on the same device, have both mapped.

    There is nothing to wait for: a worker answers when it has read a bucket.
    """

    reader, cuts, shares = "staged", True, False

    def __init__(self, device: torch.device) -> None:
        self.buffers = []
        self._device = device
        self._staging: Staging | None = None

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Make the buffers, or keep those of the last update if they are of the same size."""
        if self.buffers and self.buffers[0].nbytes != with_stamp(plan.capacity):
            self.abort("")
        if self._staging is None:
            self._staging = make_staging(plan.capacity, self._device)
            self.buffers = self._staging.buffers
        if read:
            self._staging.export()

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        assert self._staging is not None
        wait_for_writes(self._device)
        return {"handle": self._staging.handle}

    def finish(self, release: bool) -> None:
        if release:
            Staged.abort(self, "")

    def abort(self, reason: str) -> None:
        self.buffers = []  # before the memory is given back
        if self._staging is not None:
            self._staging.close()
            self._staging = None


class ZeroCopy(Staged):
    """One memory for the weights of one rank and one worker: after the first update an optimizer step is the sync.
    The few weights of which the engine keeps something else, such as -exp(A_log), go on being sent.

    Three ways to have it were weighed: the engine takes over memory of the trainer's (its CUDA graphs were captured
    with addresses of its own), one piece of memory mapped twice through the driver (vLLM's sleeping pool can be mapped
    anew, but not exported), and this one: the worker hands out its parameters, and the trainer's become views of them.
    """

    shares = True

    def __init__(
        self,
        device: torch.device,
        parameters: list[SourceParameter],
        compute_in: Callable[[dict[str, torch.Tensor]], None],
        timeout: float,
    ) -> None:
        """`compute_in` takes the engine's memory of each shared parameter, flat, to compute in from then on.
        The engine must have one worker, with `shared_weights` set; `timeout` is of the wait for it, s.
        """
        super().__init__(device)
        self.in_place = False
        self._sent: list[SourceParameter] = []
        self._parameters = parameters
        self._compute_in = compute_in
        self._timeout = timeout
        self._call: WorkerCall | None = None

    def connect(self, call: WorkerCall | None) -> None:
        self._call = call

    def transfer(self, update: Transfer) -> None:
        """Bring the weights; once the memory is shared, only tell the worker that they are new."""
        if self.in_place:
            if self._sent:
                update.push(self._sent, None)
            wait_for_writes(self._device)  # the worker reads the memory at once
            update.post("in_place")
        else:
            update.push_all()

    def finish(self, release: bool) -> None:
        """Move the trainer's computation into the engine's memory after the first update, when it
        holds the weights.
        """
        super().finish(release=True)
        if self.in_place:
            return
        assert self._call is not None
        shared = self._call("hotbunk_share_weights").result(self._timeout)[0]
        places, storages = shared["places"], open_memory(shared["handle"], self._device)
        self._sent = [p for p in self._parameters if not all(piece.name in places for piece in p.pieces)]
        shares = [parameter for parameter in self._parameters if parameter not in self._sent]
        self._compute_in({p.name: memory_of(p, places, storages) for p in shares})
        wait_for_writes(self._device)
        self.in_place = True

    def abort(self, reason: str) -> None:
        """Stop sharing; the next update brings every weight, and shares them again."""
        super().abort(reason)
        self.in_place = False


def memory_of(
    parameter: SourceParameter, places: dict[str, tuple[int, int]], storages: list[torch.Tensor]
) -> torch.Tensor:
    """Return a parameter's memory in the engine, flat, in the engine's dtype.
    `places`: weight -> number of the storage it lies in, and the byte at which it begins there. A parameter of two
    weights of 288 and 192 bytes may lie at (0, 512) and (0, 800), which makes one run.
    Raises SyncError: the parameter consists of weights that the engine keeps in different places.
    """
    starts = {(places[p.name][0], places[p.name][1] - p.offset) for p in parameter.pieces}
    if len(starts) > 1:
        raise SyncError(
            f"the engine keeps the parts of {parameter.name} apart, so the trainer cannot compute with it: "
            "set sync.way to staged"
        )
    number, start = starts.pop()
    return storages[number][start : start + parameter.nbytes].view(getattr(torch, parameter.pieces[0].dtype))
