"""The plan of buckets: parameters in order, in portions of at most `sync.bucket_mib`, which are
gathered one by one.

Every rank cuts them alike, since only names and shapes decide.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from sharding.send.source import WeightSource
from sharding.wire.manifest import Piece, SourceParameter, Stretch
from sharding.wire.staging import STAMP_BYTES, stamp

ALIGNMENT = 512
"""Bytes. Every parameter starts on such a boundary, so that any dtype and any vectorised copy can
start there.
"""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket, in bytes; or that of a part of it: the same stretch of every
    shard. `offset`: from the start of the bucket. `nbytes`: of all shards' stretches together,
    which follow one another. `start`: from the start of each shard.
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
        """Return the elements of the checkpoint's tensors that lie here; padding is left out. Of
        [8, 64] float32 from two shards of 1024 bytes, the part with `start` 512 and 1024 bytes
        holds elements 128 to 255 and 384 to 511.
        """
        shard = self.parameter.nbytes // self.parameter.shards
        length = self.nbytes // self.parameter.shards
        for number in range(self.parameter.shards):
            begin = number * shard + self.start
            offset = self.offset + number * length
            for piece in self.parameter.pieces:
                first = max(begin, piece.offset)
                last = min(begin + length, piece.offset + piece.nbytes)
                if first < last:
                    at = (first - piece.offset) // piece.itemsize
                    count = (last - first) // piece.itemsize
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
        return [
            Piece(p.name, p.dtype, p.shape, s.offset + p.offset)
            for s in slots
            for p in s.parameter.pieces
        ]

    def stretches(self) -> list[Stretch]:
        """Return the elements of the other tensors in the bucket."""
        return [stretch for slot in self.slots if not slot.whole for stretch in slot.stretches()]


class BucketPlan:
    """Parameters in order, cut into buckets of at most `bucket_bytes`.

    One that is larger travels in parts, if it may, and has a bucket to itself otherwise. A part is
    the same stretch of every rank's shard rather than some rows of the parameter: so each rank
    gives equally much of its own to each part, and the gather of a part puts it into its place, as
    that of a parameter does. `parameters`: in the order in which they are sent. `capacity`: bytes
    of the largest bucket, and so of each staging buffer.
    """

    def __init__(
        self,
        parameters: list[SourceParameter],
        bucket_bytes: int,
        unsplit: Collection[str] | None = None,
    ) -> None:
        """Cut the buckets. A parameter may travel in parts if it holds none of the checkpoint
        tensors in `unsplit`, and `unsplit` is not None.
        """
        if bucket_bytes < ALIGNMENT:
            raise ValueError(
                f"a bucket of {bucket_bytes} bytes is smaller than the alignment of {ALIGNMENT}"
            )
        self.parameters = parameters
        self.buckets: list[Bucket] = []
        slots: list[Slot] = []
        end = 0
        for parameter, start, nbytes in _parts(parameters, bucket_bytes, unsplit):
            size = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
            if slots and end + size > bucket_bytes:
                self.buckets.append(Bucket(tuple(slots), end))
                slots = []
                end = 0
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
        splits = unsplit is not None and not any(piece.name in unsplit for piece in parameter.pieces)
        if splits and parameter.nbytes > bucket_bytes:
            step = max(bucket_bytes // parameter.shards // ALIGNMENT, 1) * ALIGNMENT
        for start in range(0, shard, step) if shard else [0]:
            yield parameter, start, parameter.shards * min(step, shard - start)


def gather(source: WeightSource, bucket: Bucket, buffer: torch.Tensor, mark: int) -> None:
    """Fill a staging buffer with a bucket, and its stamp behind it."""
    slots = [(slot, buffer[slot.offset : slot.offset + slot.nbytes]) for slot in bucket.slots]
    complete = {slot.parameter.name: memory for slot, memory in slots if slot.whole}
    source.gather_into(list(complete), list(complete.values()))
    for slot, memory in slots:
        if not slot.whole:
            source.gather_part(slot.parameter.name, slot.start, memory)
    stamp(buffer[: bucket.nbytes + STAMP_BYTES], mark)
