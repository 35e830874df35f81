"""How a list of parameters is cut into buckets: the same on every rank, since nothing but names and shapes decides."""

import math
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 512
"""Bytes. Every parameter starts on such a boundary, so that any dtype and any vectorised copy can start there."""


Manifest = dict[str, list[Any]]
"""Checkpoint name -> [shape, dtype as torch names it without its prefix]; plain types, since it travels."""


@dataclass(frozen=True)
class Piece:
    """One tensor under its checkpoint name, as a contiguous run of the parameter it is stored in.

    Attributes:
        offset: bytes from the start of the parameter (in `SourceParameter`) or of the bucket (in `Bucket`).
        dtype: the engine's dtype, as torch names it without its prefix ("bfloat16").
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SourceParameter:
    """One parameter as the trainer holds it.

    Attributes:
        nbytes: of its slot in a bucket: the whole parameter in the engine's dtype, and the padding its gather leaves
            behind.
        pieces: the checkpoint tensors inside; one, except where Transformers fuses (experts of an MoE layer).
    """

    name: str
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket, in bytes."""

    parameter: SourceParameter
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together."""

    slots: tuple[Slot, ...]
    nbytes: int

    def pieces(self) -> list[Piece]:
        """Every checkpoint tensor in the bucket, with its byte offset in the bucket."""
        return [Piece(p.name, p.dtype, p.shape, s.offset + p.offset) for s in self.slots for p in s.parameter.pieces]


class BucketPlan:
    """Parameters in order, cut into buckets of at most `bucket_bytes`; one that is larger gets a bucket to itself.

    Attributes:
        capacity: bytes of the largest bucket, and so of each staging buffer.
    """

    def __init__(self, parameters: list[SourceParameter], bucket_bytes: int, alignment: int = ALIGNMENT) -> None:
        if bucket_bytes < alignment:
            raise ValueError(f"a bucket of {bucket_bytes} bytes is smaller than the alignment of {alignment}")
        self.buckets: list[Bucket] = []
        slots: list[Slot] = []
        end = 0
        for parameter in parameters:
            size = math.ceil(parameter.nbytes / alignment) * alignment
            if slots and end + size > bucket_bytes:
                self.buckets.append(Bucket(tuple(slots), end))
                slots, end = [], 0
            slots.append(Slot(parameter, end))
            end += size
        if slots:
            self.buckets.append(Bucket(tuple(slots), end))
        self.capacity = max((b.nbytes for b in self.buckets), default=0)

    def parameters(self) -> list[SourceParameter]:
        """Every parameter, in the order in which they are sent."""
        return [slot.parameter for bucket in self.buckets for slot in bucket.slots]

    def names(self) -> list[str]:
        """Checkpoint names in the order in which they are sent."""
        return [piece.name for bucket in self.buckets for piece in bucket.pieces()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, padding included."""
        return sum(b.nbytes for b in self.buckets)
