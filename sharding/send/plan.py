"""Cuts a list of parameters into buckets, the same on every rank, since only names and shapes decide."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sharding.wire.manifest import Piece, SourceParameter, Stretch

ALIGNMENT = 512
"""Bytes. Every parameter starts on such a boundary, so that any dtype and any vectorised copy can start there."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket, in bytes; or that of a part of it: the same stretch of every shard.

    Attributes:
        offset: from the start of the bucket.
        nbytes: of all shards' stretches together, which follow one another.
        start: from the start of each shard.
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
        """The elements of the checkpoint's tensors that lie here; padding is left out.

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
        """Every checkpoint tensor that is whole in the bucket, with its byte offset in the bucket."""
        slots = [slot for slot in self.slots if slot.whole]
        return [Piece(p.name, p.dtype, p.shape, s.offset + p.offset) for s in slots for p in s.parameter.pieces]

    def stretches(self) -> list[Stretch]:
        """The elements of the other tensors in the bucket."""
        return [stretch for slot in self.slots if not slot.whole for stretch in slot.stretches()]


class BucketPlan:
    """Parameters in order, cut into buckets of at most `bucket_bytes`.

    One that is larger travels in parts, if it may, and has a bucket to itself otherwise. A part is the same stretch of
    every rank's shard rather than some rows of the parameter: so each rank gives equally much of its own to each part,
    and the gather of a part puts it into its place, as that of a parameter does.

    Attributes:
        capacity: bytes of the largest bucket, and so of each staging buffer.
    """

    def __init__(
        self, parameters: list[SourceParameter], bucket_bytes: int, whole: Collection[str] | None = None
    ) -> None:
        """Those parameters may travel in parts that hold none of the checkpoint tensors in `whole`; None: none may."""
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"a bucket of {bucket_bytes} bytes is smaller than the alignment of {ALIGNMENT}")
        self.buckets: list[Bucket] = []
        self._parameters = parameters
        slots: list[Slot] = []
        end = 0
        for parameter, start, nbytes in _parts(parameters, bucket_bytes, whole):
            size = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
            if slots and end + size > bucket_bytes:
                self.buckets.append(Bucket(tuple(slots), end))
                slots, end = [], 0
            slots.append(Slot(parameter, end, nbytes, start))
            end += size
        if slots:
            self.buckets.append(Bucket(tuple(slots), end))
        self.capacity = max((b.nbytes for b in self.buckets), default=0)

    def parameters(self) -> list[SourceParameter]:
        """Every parameter, in the order in which they are sent."""
        return self._parameters

    def names(self) -> list[str]:
        """Checkpoint names in the order in which they are sent."""
        return [piece.name for parameter in self._parameters for piece in parameter.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, padding included."""
        return sum(b.nbytes for b in self.buckets)


def _parts(
    parameters: list[SourceParameter], bucket_bytes: int, whole: Collection[str] | None
) -> Iterator[tuple[SourceParameter, int, int]]:
    """Each parameter with the `start` and `nbytes` of its slots."""
    for parameter in parameters:
        shard = step = parameter.nbytes // parameter.shards
        if parameter.nbytes > bucket_bytes and whole is not None and not any(p.name in whole for p in parameter.pieces):
            step = max(bucket_bytes // parameter.shards // ALIGNMENT, 1) * ALIGNMENT
        for start in range(0, shard, step) if shard else [0]:
            yield parameter, start, parameter.shards * min(step, shard - start)
