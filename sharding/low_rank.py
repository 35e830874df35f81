"""Weights with low-rank adapters, sent as if they had been trained whole: W + scale · B A (arXiv 2106.09685, eq. 3).

The sum is made anew for every sync, in float32, of the elements that a rank holds and of no others; the weights
themselves are never touched, so that no rounding adds up.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .source import FsdpWeightSource, PieceLayout, all_gather, one_piece, partition, shard_group, whole_shape


class LowRank(NamedTuple):
    """What is added to a weight [out, in]: `scale` · `b` [out, r] · `a` [r, in]; the factors may be sharded."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum for a whole weight [out, in] of any dtype, as a new float32 tensor. Collective."""
        return self.added_to_stretch(weight.reshape(-1), 0).view(weight.shape)

    def added_to_stretch(self, values: torch.Tensor, offset: int) -> torch.Tensor:
        """The sum for the weight's elements [offset, offset + n), as a new float32 tensor [n]. Collective.

        `values` [n] may reach beyond the weight's end, as the padding of a last shard does; that is left as it is.
        """
        a, b = gathered(self.a).float(), gathered(self.b).float()
        width = a.shape[1]
        end = min(offset + values.numel(), b.shape[0] * width)
        first, last = offset // width, math.ceil(end / width)
        delta = (self.scale * (b[first:last] @ a)).reshape(-1)[offset - first * width : end - first * width]
        summed = values.to(torch.float32, copy=True)
        summed[: delta.numel()] += delta
        return summed


class MergingWeightSource(FsdpWeightSource):
    """A `WeightSource` of base weights, some of which go out with their adapter added."""

    def __init__(
        self,
        named_parameters: list[tuple[str, torch.Tensor]],
        adapters: dict[str, LowRank],
        dtype: torch.dtype,
        layout: PieceLayout = one_piece,
    ) -> None:
        """`adapters` are by the names of the parameters they are added to."""
        super().__init__(named_parameters, dtype, layout)
        if strangers := sorted(adapters.keys() - self._tensors.keys()):
            raise ValueError(f"there are adapters for weights that the policy does not have: {strangers[:5]}")
        self._adapters = adapters

    def _to_send(self, name: str, values: torch.Tensor, offset: int) -> torch.Tensor:
        return self._adapters[name].added_to_stretch(values, offset) if name in self._adapters else values


def gathered(tensor: Any) -> torch.Tensor:
    """The whole of a small parameter on every rank, in its own dtype. Collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    shape, group = whole_shape(tensor), shard_group(tensor)
    if group is None:
        return (partition(tensor)[: shape.numel()].view(shape) if hasattr(tensor, "ds_tensor") else tensor).detach()
    own = partition(tensor)
    whole = torch.empty(own.numel() * dist.get_world_size(group), dtype=own.dtype, device=own.device)
    all_gather(whole, own, group=group)
    return whole[: shape.numel()].view(shape)
