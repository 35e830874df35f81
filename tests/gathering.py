"""What an engine would be sent, on this rank."""

import math

import torch
from torch import Tensor

from sharding.source import WeightSource


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
