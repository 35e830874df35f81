"""Where weights come from: sharded parameters, gathered one bucket at a time straight into the staging buffer.

Three ways were weighed for FSDP2: `full_tensor()` (a full copy per parameter and a copy into the buffer), one
flattened all-gather per bucket (a second bucket of memory, since ranks' shards arrive interleaved), and this one: an
all-gather per parameter whose output *is* the parameter's slot. FSDP2 shards dimension 0 in equal chunks with only the
last ones short, so what arrives rank after rank is the parameter itself, with the padding behind it: no copy and no
extra memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from .plan import Piece, SourceParameter

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on

PieceLayout = Callable[[str, torch.Size], Sequence[tuple[str, int, tuple[int, ...]]]]
"""(parameter name, shape) -> [(checkpoint name, offset in elements, shape)]: contiguous runs that cover the parameter.
"""


class WeightSource(Protocol):
    """What the sharding manager needs from a policy."""

    def parameters(self) -> list[SourceParameter]:
        """All parameters in layer order, tied duplicates once, the same list on every rank."""

    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        """Fill each slot (uint8 [nbytes], on the policy's device) with the whole parameter in the engine's dtype.

        Collective: every rank calls it with the same names in the same order.
        """


def one_piece(name: str, shape: torch.Size) -> list[tuple[str, int, tuple[int, ...]]]:
    """The layout of a parameter that its checkpoint stores under its own name."""
    return [(name, 0, tuple(shape))]


class FsdpWeightSource:
    """Weights of a module whose parameters are FSDP2 DTensors, or plain tensors that every rank holds whole."""

    def __init__(
        self, named_parameters: list[tuple[str, torch.Tensor]], dtype: torch.dtype, layout: PieceLayout = one_piece
    ) -> None:
        self._tensors = dict(named_parameters)
        self._dtype = dtype
        self._layout = layout

    def parameters(self) -> list[SourceParameter]:
        """See `WeightSource.parameters`."""
        return [self._describe(name, tensor) for name, tensor in self._tensors.items()]

    def _describe(self, name: str, tensor: torch.Tensor) -> SourceParameter:
        dtype = str(self._dtype).removeprefix("torch.")
        size = self._dtype.itemsize
        pieces = tuple(Piece(n, dtype, s, offset * size) for n, offset, s in self._layout(name, tensor.shape))
        if sum(math.prod(p.shape) for p in pieces) != tensor.numel():
            raise ValueError(f"the checkpoint layout of {name} {tuple(tensor.shape)} does not cover it: {pieces}")
        elements = tensor.numel()
        if shard_group(tensor) is not None:
            ranks, rows = dist.get_world_size(shard_group(tensor)), tensor.shape[0]
            elements = math.ceil(rows / ranks) * ranks * (tensor.numel() // rows)
        return SourceParameter(name, elements * size, pieces)

    @torch.no_grad()
    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        """See `WeightSource.gather_into`. Casts on the shard, before the gather: less to cast and less to send."""
        pending = []
        for name, slot in zip(names, slots, strict=True):
            tensor = self._tensors[name]
            group = shard_group(tensor)
            if group is None or not isinstance(tensor, DTensor):
                whole = _whole(tensor)
                slot.view(self._dtype)[: whole.numel()].copy_(whole.reshape(-1))
                continue
            shard = self._padded_shard(tensor, slot.numel() // dist.get_world_size(group))
            pending.append((_all_gather(slot, shard, group=group, async_op=True), shard))
        for work, _ in pending:
            work.wait()

    def _padded_shard(self, tensor: DTensor, nbytes: int) -> torch.Tensor:
        """This rank's rows in the engine's dtype, as uint8 [nbytes], with zeros behind them where it has fewer."""
        local = tensor.to_local().reshape(-1)
        if local.dtype == self._dtype and local.nbytes == nbytes:
            return local.view(torch.uint8)
        shard = torch.zeros(nbytes // self._dtype.itemsize, dtype=self._dtype, device=local.device)
        shard[: local.numel()].copy_(local)
        return shard.view(torch.uint8)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def shard_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The process group over which dimension 0 of a DTensor is sharded, or None where a plain gather will not do.

    Replicated dimensions (HSDP) need no gather. A single rank, a tensor without rows and any other placement give None.
    """
    if not isinstance(tensor, DTensor) or tensor.dim() == 0:
        return None
    sharded = [i for i, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(sharded) != 1 or tensor.placements[sharded[0]] != Shard(0) or tensor.shape[0] == 0:
        return None
    group = tensor.device_mesh.get_group(sharded[0])
    return group if dist.get_world_size(group) > 1 else None
