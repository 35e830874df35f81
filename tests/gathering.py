"""What an engine would be sent, on this rank, and what it is compared with."""

import math

import torch
from torch import Tensor

from sharding.digests import held
from sharding.source import ShardedSource, WeightSource
from sharding.verifying import DigestCheck


def sent(source: WeightSource) -> dict[str, Tensor]:
    """Every piece by its name in the checkpoint, gathered as for a sync. Collective."""
    parameters = source.parameters()
    slots = [torch.empty(parameter.nbytes, dtype=torch.uint8) for parameter in parameters]
    source.gather_into([parameter.name for parameter in parameters], slots)
    found = {}
    for parameter, slot in zip(parameters, slots, strict=True):
        for piece in parameter.pieces:
            dtype = getattr(torch, piece.dtype)
            stretch = slot[piece.offset : piece.offset + math.prod(piece.shape) * dtype.itemsize]
            found[piece.name] = stretch.view(dtype).view(piece.shape)
    return found


def assert_ranks_hold(source: ShardedSource, weights: dict[str, Tensor]) -> None:
    """The digests of all ranks' own parts add up to those of these weights, and of no others. Collective."""
    check = DigestCheck(source, source.parameters(), "full", version=1)
    check.expect({name: [[0, list(weight.shape), list(weight.stride())]] for name, weight in weights.items()})  # type: ignore[list-item]
    digests = {name: held([weight], None) for name, weight in weights.items()}
    assert check.different(digests) == [] and check.ordinary == []
    last = next(reversed(weights))
    assert check.different(digests | {last: held([weights[last].neg()], None)}) == [last]
