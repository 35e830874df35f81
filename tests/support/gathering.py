"""Gathers what an engine would be sent on this rank, and compares digests with it."""

import math

import torch
from torch import Tensor

from sharding.send.buckets import BucketPlan, gather
from sharding.send.source import ShardedSource, WeightSource
from sharding.verify import Verification
from sharding.wire.digests import digest_of
from sharding.wire.staging import STAMP_BYTES


def sent(source: WeightSource) -> dict[str, Tensor]:
    """Return every weight by its name in the checkpoint, gathered as for a sync. Collective."""
    parameters = source.parameters()
    slots = [torch.empty(parameter.nbytes, dtype=torch.uint8) for parameter in parameters]
    source.gather_into([parameter.name for parameter in parameters], slots)
    weights = {}
    for parameter, slot in zip(parameters, slots, strict=True):
        for piece in parameter.pieces:
            dtype = getattr(torch, piece.dtype)
            stretch = slot[piece.offset : piece.offset + math.prod(piece.shape) * dtype.itemsize]
            weights[piece.name] = stretch.view(dtype).view(piece.shape)
    return weights


def sent_in_parts(source: WeightSource, bucket_bytes: int) -> dict[str, Tensor]:
    """Return what `sent` does, gathered through a buffer of `bucket_bytes`; each element arrives once. Collective."""
    parameters = source.parameters()
    pieces = [piece for parameter in parameters for piece in parameter.pieces]
    weights = {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in pieces}
    times = {name: torch.zeros(weight.numel(), dtype=torch.int32) for name, weight in weights.items()}
    for bucket in BucketPlan(parameters, bucket_bytes, unsplit=()).buckets:
        assert bucket.nbytes <= bucket_bytes
        buffer = torch.full((bucket.nbytes + STAMP_BYTES,), 255, dtype=torch.uint8)
        gather(source, bucket, buffer, 1)
        stretches = [(p.name, 0, math.prod(p.shape), p.offset) for p in bucket.pieces()]
        stretches += [(s.name, s.first, s.count, s.offset) for s in bucket.stretches()]
        for name, first, count, offset in stretches:
            weight = weights[name].view(-1)[first : first + count]
            weight.copy_(buffer[offset : offset + weight.nbytes].view(weight.dtype))
            times[name][first : first + count] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return weights


def assert_ranks_hold(source: ShardedSource, weights: dict[str, Tensor]) -> None:
    """The digests of all ranks' parts add up to those of these weights, and of no other weights. Collective."""
    check = Verification(source, source.parameters(), "full", version=1)
    views = {name: [[0, list(weight.shape), list(weight.stride())]] for name, weight in weights.items()}
    check.expect([{"plain": True, "views": views}])
    digests = {name: digest_of([weight], None) for name, weight in weights.items()}
    assert check.different([{"digests": digests}]) == [[]] and check.undigested == []
    last = next(reversed(weights))
    wrong = digests | {last: digest_of([weights[last].neg()], None)}
    assert check.different([{"digests": wrong}]) == [[last]]
