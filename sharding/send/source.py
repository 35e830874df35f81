"""Sources of weights: sharded parameters, gathered one bucket at a time straight into the staging
buffer.

Three ways were weighed for FSDP2: `full_tensor()` (a full copy per parameter and a copy into the
buffer), one flattened all-gather per bucket (a second bucket of memory, since ranks' shards arrive
interleaved), and this one: an all-gather of each parameter whose output *is* the parameter's slot,
those of a bucket coalesced into one collective. FSDP2 shards dimension 0 in equal chunks with only
the last ones short, so what arrives rank after rank is the parameter itself, with the padding
behind it: no copy and no extra memory. The same holds of ZeRO-3, which cuts the flattened parameter
into equal stretches, the last one padded, and of a part of a parameter that is too large for a
bucket: the same stretch of every rank's shard. Experts in parallel are cut twice, and gathered in
the order of their parts.

Weights with low-rank adapters are sent as if they had been trained whole: W + scale · B A
(`sharding.wire.low_rank`). The sum is made anew for every sync, in float32, of the elements that a
rank holds; the weights themselves are never touched, so that no rounding adds up.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sharding.ranks import rank
from sharding.wire.channel import SyncError
from sharding.wire.low_rank import Factors
from sharding.wire.manifest import Manifest, Piece, SourceParameter

# Its name from torch 2.13 on
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

LARGE_BYTES = 1 << 20
"""Bytes of a slot. Gloo coalesces through flat copies of everything, in and out (torch's
ProcessGroupGloo.cpp, allgather_coalesced): that takes a fifth of the time where parameters are some
KiB and mostly wait for messages, and more time where they are large. NCCL makes no copies.
"""

Addition = tuple[float, str, str]
"""A scale, and the names under which `FsdpWeightSource.in_memory` has the factors B and A of the
addition.
"""

PieceLayout = Callable[[str, torch.Size], Sequence[tuple[str, int, tuple[int, ...]]]]
"""(parameter name, shape) -> [(checkpoint name, offset in elements, shape)]: contiguous runs that
cover the parameter.
"""


class WeightSource(Protocol):
    """The weights of a policy, as the sharding manager gathers them."""

    def parameters(self) -> list[SourceParameter]:
        """Return all parameters in layer order, tied duplicates once, the same list on every
        rank.
        """

    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        """Fill each slot (uint8 [nbytes], on the policy's device) with the whole parameter in the
        engine's dtype. Collective: every rank calls it with the same names in the same order.
        """

    def gather_part(self, name: str, start: int, slot: torch.Tensor) -> None:
        """Fill a slot with a part of a parameter: bytes [start, start + n) of every shard,
        concatenated. See `Slot`. Collective, as `gather_into`.
        """


@runtime_checkable
class ShardedSource(WeightSource, Protocol):
    """A source that knows each rank's part of a weight, so that the parts can be compared with the
    arrived weights.
    """

    def own_values(self, name: str) -> tuple[int, torch.Tensor]:
        """Return this rank's part of a parameter: the first element's number, and the flat values,
        yet to be cast. Of [5, 4] cut over two ranks, rank 1 has elements 12 to 19. Collective over
        the `holders`. The values must not be changed; padding may follow them.
        """

    def holders(self, name: str) -> list[int]:
        """Return the ranks whose parts are the whole parameter, this one among them."""


def one_piece(name: str, shape: torch.Size) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the layout of a parameter that its checkpoint stores under its own name."""
    return [(name, 0, tuple(shape))]


class FsdpWeightSource:
    """A `ShardedSource`: a module whose parameters are FSDP2 DTensors, cut by ZeRO-3, or whole on
    every rank.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        layout: PieceLayout = one_piece,
        uncast: Collection[str] = (),
    ) -> None:
        """Describe parameters to send in the engine's `dtype`. The tensors named in `uncast`, which
        are whole on every rank, are sent in their own dtype.
        """
        self._tensors = dict(named_parameters)
        self._dtype = dtype
        self._layout = layout
        self._uncast = set(uncast)

    def parameters(self) -> list[SourceParameter]:
        """Return all parameters in layer order, as `WeightSource.parameters` does. Raises
        ValueError if a checkpoint's layout does not cover a parameter.
        """
        return [self._describe(name, tensor) for name, tensor in self._tensors.items()]

    def _describe(self, name: str, tensor: torch.Tensor) -> SourceParameter:
        dtype = str(self._dtype_of(name)).removeprefix("torch.")
        size = self._dtype_of(name).itemsize
        shape = whole_shape(tensor)
        pieces = tuple(Piece(n, dtype, s, offset * size) for n, offset, s in self._layout(name, shape))
        if sum(math.prod(p.shape) for p in pieces) != shape.numel():
            raise ValueError(
                f"the checkpoint layout of {name} {tuple(shape)} does not cover it: {pieces}"
            )
        if (group := shard_group(tensor)) is None:
            return SourceParameter(name, shape.numel() * size, pieces)
        ranks = dist.get_world_size(group)
        return SourceParameter(name, ranks * _largest_shard(tensor, ranks) * size, pieces, ranks)

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype if name in self._uncast else self._dtype

    @torch.no_grad()
    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        """Gather parameters. The cast is on the shard, before the gather: less to cast and less to
        send.
        """
        shared: dict[dist.ProcessGroup, list[tuple[str, torch.Tensor]]] = {}
        for name, slot in zip(names, slots, strict=True):
            if (group := shard_group(self._tensors[name])) is not None:
                shared.setdefault(group, []).append((name, slot))
            else:
                _, values = self.own_values(name)
                slot.view(self._dtype_of(name))[: values.numel()].copy_(values)
        pending = []
        for group, some in shared.items():
            pending += [self._start(group, pairs) for pairs in _batches(some)]
        for work, _ in pending:
            work.wait()

    @torch.no_grad()
    def gather_part(self, name: str, start: int, slot: torch.Tensor) -> None:
        """Gather a part of each shard; see `WeightSource.gather_part`. Collective."""
        if (group := shard_group(self._tensors[name])) is None:
            target = slot.view(self._dtype_of(name))
            target.copy_(self._stretch(name, start // target.itemsize, target.numel()))
        else:
            shard = self._padded_shard(name, slot.numel() // dist.get_world_size(group), start).to(
                slot.device
            )
            all_gather(slot, shard, group=group)

    def _start(
        self, group: dist.ProcessGroup, pairs: list[tuple[str, torch.Tensor]]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Gather parameters into their slots, as one collective.
        Return the work to wait for, and memory to keep until then.
        """
        parts = dist.get_world_size(group)
        shards = [
            self._padded_shard(name, slot.numel() // parts).to(slot.device) for name, slot in pairs
        ]
        if len(pairs) == 1:
            return all_gather(pairs[0][1], shards[0], group=group, async_op=True), shards
        with dist._coalescing_manager(group, async_ops=True) as works:
            for (_, slot), shard in zip(pairs, shards, strict=True):
                all_gather(slot, shard, group=group)
        return works, shards

    @torch.no_grad()
    def own_values(self, name: str) -> tuple[int, torch.Tensor]:
        """Return the first element's number and the values of this rank's part, as
        `ShardedSource.own_values` does. Collective over the `holders`.
        """
        first, values = self._own_part(name)
        return first, self._to_send(name, values, first)

    def _own_part(self, name: str) -> tuple[int, torch.Tensor]:
        """Return the values of `own_values` as they lie in this rank's memory."""
        tensor = self._tensors[name]
        if (group := shard_group(tensor)) is None:
            return 0, _whole(tensor).reshape(-1)
        first = dist.get_rank(group) * _largest_shard(tensor, dist.get_world_size(group))
        return first, local_part(tensor).reshape(-1)

    def _stretch(self, name: str, begin: int, count: int) -> torch.Tensor:
        """Return those of the elements [begin, begin + count) of `own_values` that exist."""
        first, values = self._own_part(name)
        return self._to_send(name, values[begin : begin + count], first + begin)

    @torch.no_grad()
    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the parameters that need no gather, in place: name -> flat
        view.
        """
        return {name: local_part(self._tensors[name]).view(-1) for name in self._local_names}

    @cached_property
    def _local_names(self) -> list[str]:  # found out once, since asking DTensors takes milliseconds
        return [
            name for name, t in self._tensors.items() if shard_group(t) is not None or not _is_cut(t)
        ]

    def in_memory(self) -> "FsdpWeightSource":
        """Return the source of the weights in the ranks' memory, before adapters are added: here
        this one.
        """
        return self

    def additions(self) -> dict[str, Addition]:
        """Return the additions to parameters made as they are sent, by name: none here."""
        return {}

    def holders(self, name: str) -> list[int]:
        """Return the ranks whose parts make up the parameter: this rank alone where it is whole."""
        group = shard_group(self._tensors[name])
        return [rank()] if group is None else dist.get_process_group_ranks(group)

    def _to_send(self, name: str, values: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the values to send for elements [offset, offset + n) of a parameter: here `values`
        [n] unchanged. Called on all ranks of the parameter's group, in the same order. `values`
        must not be changed.
        """
        return values

    def _padded_shard(self, name: str, nbytes: int, start: int = 0) -> torch.Tensor:
        """Return this rank's shard in the engine's dtype from byte `start` on, as uint8 [nbytes],
        padded with zeros.
        """
        count = nbytes // self._dtype.itemsize
        local = self._stretch(name, start // self._dtype.itemsize, count)
        if local.dtype == self._dtype and local.numel() == count:
            return local.view(torch.uint8)
        shard = torch.zeros(count, dtype=self._dtype, device=local.device)
        shard[: local.numel()].copy_(local)
        return shard.view(torch.uint8)


def _batches(pairs: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Group pairs by collective: all of a bucket in one, but large ones alone where gloo copies
    them twice.
    """
    batches = []
    together = []
    for name, tensor in pairs:
        if not tensor.is_cuda and tensor.numel() > LARGE_BYTES:
            batches.append([(name, tensor)])
        else:
            together.append((name, tensor))
    return [*batches, together] if together else batches


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the parameter's shape; ZeRO-3 leaves it empty and remembers the shape beside it."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def partition(tensor: Any) -> torch.Tensor:
    """Return this rank's stretch of a parameter that ZeRO-3 has cut."""
    stretch: torch.Tensor = tensor.ds_tensor
    return stretch.detach()


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a parameter: rows of a DTensor, ZeRO-3's stretch, or all of a
    whole one.
    """
    if hasattr(tensor, "ds_tensor"):
        return partition(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest_shard(tensor: torch.Tensor, ranks: int) -> int:
    """Return the number of elements of the first rank's part, the largest."""
    if hasattr(tensor, "ds_tensor"):
        return partition(tensor).numel()
    return math.ceil(tensor.shape[0] / ranks) * (tensor.numel() // tensor.shape[0])


class StreamSource:
    """A `WeightSource` that reads weights from an iterator, in one process. It keeps no weight
    after it has been copied to its bucket, so weights are sent whole and cannot be verified. The
    iterator may have another order than `info`: weights that come early are kept until they are
    asked for.
    """

    def __init__(self, info: Manifest, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Prepare to read `weights`. `info` announces them: checkpoint name -> [shape, dtype to
        send it in].
        """
        self._info = info
        self._weights = iter(weights)
        self._early: dict[str, torch.Tensor] = {}
        self._seen: set[str] = set()

    def parameters(self) -> list[SourceParameter]:
        """Return one parameter for each weight in `info`, in its order."""
        pieces = [Piece(name, dtype, tuple(shape), 0) for name, (shape, dtype) in self._info.items()]
        return [SourceParameter(piece.name, piece.nbytes, (piece,)) for piece in pieces]

    @torch.no_grad()
    def gather_into(self, names: list[str], slots: list[torch.Tensor]) -> None:
        """Take the next weights from the iterator into their slots. Raises SyncError: naming a
        weight that is missing, unexpected, that came twice or in another shape.
        """
        for name, slot in zip(names, slots, strict=True):
            while name not in self._early:
                if not self._take():
                    raise SyncError(f"the iterator of weights ended without {name}")
            weight = self._early.pop(name)
            slot.view(getattr(torch, self._info[name][1]))[: weight.numel()].copy_(weight.reshape(-1))
        if len(self._seen) == len(self._info):
            self._take()  # there may be none behind the last

    def gather_part(self, name: str, start: int, slot: torch.Tensor) -> None:
        """Raise an error: a weight is let go as soon as it has been sent, so it is sent whole."""
        raise SyncError(f"{name} comes from an iterator and cannot be sent in parts")

    def _take(self) -> bool:
        name, tensor = next(self._weights, (None, None))
        if name is None or tensor is None:
            return False
        if name not in self._info or name in self._seen:
            raise SyncError(
                f"the iterator of weights brought {name} "
                + ("twice" if name in self._seen else "unasked")
            )
        if list(tensor.shape) != list(self._info[name][0]):
            raise SyncError(
                f"{name} has shape {list(tensor.shape)} where {list(self._info[name][0])} is expected"
            )
        self._seen.add(name)
        self._early[name] = _whole(tensor)
        return True


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "ds_tensor"):
        return partition(tensor)[: whole_shape(tensor).numel()]
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return unsharded(tensor) if _is_cut(tensor) else tensor.to_local()


def unsharded(tensor: DTensor) -> torch.Tensor:
    """Gather all of a DTensor on its mesh's device, whose collectives cannot read shards in host
    memory.
    """
    on_device: Any = tensor.detach().to(tensor.device_mesh.device_type)
    if (group := shard_group(tensor)) is None:
        whole: torch.Tensor = on_device.full_tensor()
        return whole
    part = on_device.to_local().reshape(-1)
    ranks = dist.get_world_size(group)
    values = part.new_empty(ranks * (largest := _largest_shard(tensor, ranks)))
    padded = (
        part if part.numel() == largest else torch.nn.functional.pad(part, (0, largest - part.numel()))
    )
    all_gather(values, padded, group=group)
    return values[: tensor.numel()].view(tensor.shape)


def _is_cut(tensor: torch.Tensor) -> bool:
    """Return True if other ranks hold parts of a DTensor."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = enumerate(tensor.placements)
    return any(
        tensor.device_mesh.size(i) > 1 for i, placement in sizes if not isinstance(placement, Replicate)
    )


def shard_group(tensor: Any) -> dist.ProcessGroup | None:
    """Return the process group whose ranks' parts, in order, make up the parameter; None if a plain
    gather must do. Replicated dimensions (HSDP) need no gather. A single rank, a tensor without
    rows and any other placement give None, as do experts that are cut twice
    (`policy.expert_parallel`) into unequal parts.
    """
    if hasattr(tensor, "ds_tensor"):
        group: dist.ProcessGroup = tensor.ds_process_group
        return group if dist.get_world_size(group) > 1 else None
    if not isinstance(tensor, DTensor) or tensor.dim() == 0 or tensor.shape[0] == 0:
        return None
    mesh = tensor.device_mesh
    placements = tensor.placements
    cut = [i for i, one in enumerate(placements) if not isinstance(one, Replicate) and mesh.size(i) > 1]
    if [placements[i] for i in cut] == [Shard(0)]:
        return mesh.get_group(cut[0])
    if len(cut) != 2 or tensor.shape[0] % (mesh.size(cut[0]) * mesh.size(cut[1])):
        return None
    outer, inner = cut
    strided = _StridedShard(0, split_factor=mesh.size(inner))
    if placements[outer] != strided or placements[inner] != Shard(0):
        return None
    return _group_of(dist.group.WORLD, _inner_first(mesh, outer, inner))


def _inner_first(mesh: DeviceMesh, outer: int, inner: int) -> tuple[int, ...]:
    """Return the ranks that hold a tensor cut first over `inner`, then over `outer`, in the order
    of their parts.
    """
    here: Any = mesh.get_coordinate()
    index = tuple(slice(None) if i in (outer, inner) else at for i, at in enumerate(here))
    return tuple(mesh.mesh[index].t().flatten().tolist())


@lru_cache
def _group_of(world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group with its ranks in this order. Collective when first called in a
    world.
    """
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), use_local_synchronization=True, sort_ranks=False
    )
    return group


class LowRank(NamedTuple):
    """The addition to a weight [out, in]: `scale` · `b` [out, r] · `a` [r, in]; the factors may be
    sharded.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum for a whole weight [out, in] of any dtype, as a new float32 tensor.
        Collective.
        """
        return self.added_to_stretch(weight.reshape(-1), 0).view(weight.shape)

    def added_to_stretch(self, values: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the sum for the weight's elements [offset, offset + n), as a new float32 tensor
        [n]. Collective. `values` [n] may reach beyond the weight's end, as the padding of a last
        shard does; that is left as it is.
        """
        a, b = (gathered(factor).to(torch.float32, copy=True) for factor in (self.a, self.b))
        summed = values.to(torch.float32, copy=True)

        def take(first: int, sums: torch.Tensor) -> None:
            summed[first - offset : first - offset + len(sums)] = sums

        Factors(a, b, self.scale).add(values, offset, take)
        return summed


class MergingWeightSource(FsdpWeightSource):
    """A `WeightSource` of base weights, some of which are sent with their adapter added."""

    def __init__(
        self,
        named_parameters: list[tuple[str, torch.Tensor]],
        adapters: dict[str, LowRank],
        dtype: torch.dtype,
        layout: PieceLayout = one_piece,
        uncast: Collection[str] = (),
    ) -> None:
        """Describe parameters as `FsdpWeightSource` does. `adapters`: parameter name -> the adapter
        to add to it. Raises ValueError if there is no such parameter.
        """
        super().__init__(named_parameters, dtype, layout, uncast)
        if unknown := sorted(adapters.keys() - self._tensors.keys()):
            raise ValueError(
                f"there are adapters for weights that the policy does not have: {unknown[:5]}"
            )
        self._adapters = adapters

    def _to_send(self, name: str, values: torch.Tensor, offset: int) -> torch.Tensor:
        return (
            self._adapters[name].added_to_stretch(values, offset) if name in self._adapters else values
        )

    def in_memory(self) -> FsdpWeightSource:
        """Return the source of the bases and of the factors, each as a parameter of its own."""
        factors: dict[str, torch.Tensor] = {}
        for name, (a, b, _) in self._adapters.items():
            factors |= {f"A of {name}": a, f"B of {name}": b}

        def layout(name: str, shape: torch.Size) -> Sequence[tuple[str, int, tuple[int, ...]]]:
            return one_piece(name, shape) if name in factors else self._layout(name, shape)

        return FsdpWeightSource(
            [*self._tensors.items(), *factors.items()], self._dtype, layout, self._uncast
        )

    def additions(self) -> dict[str, Addition]:
        """Return (scale, name of B, name of A) for each weight with an adapter, with the factors'
        names in `in_memory`.
        """
        return {
            name: (adapter.scale, f"B of {name}", f"A of {name}")
            for name, adapter in self._adapters.items()
        }


def gathered(tensor: Any) -> torch.Tensor:
    """Return all of a small parameter on every rank, in its own dtype. Collective."""
    shape = whole_shape(tensor)
    group = shard_group(tensor)
    if group is None or isinstance(tensor, DTensor):
        return _whole(tensor).detach().view(shape)
    part = partition(tensor)
    values = torch.empty(part.numel() * dist.get_world_size(group), dtype=part.dtype, device=part.device)
    all_gather(values, part, group=group)
    return values[: shape.numel()].view(shape)
