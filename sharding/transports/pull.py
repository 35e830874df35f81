"""Weights that workers read straight out of the shards of all ranks of their machine (`sync.way:
pull`).

The workers' record says where each element of a weight goes, and the ranks know which elements each
of them holds: so a worker copies each piece from a rank's shard to where it belongs, and casts it
on the way. Nothing is gathered, staged or sent, and a tensor-parallel worker reads no more than its
slices. The ranks' shards lie in memory that is exported once for the life of the run. Where
adapters are merged into weights, workers read the factors, too, and add block by block
(`sharding.wire.low_rank`). What vLLM's loaders compute, or vLLM re-processes, is staged in the same
update.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generation.engine.allocator import plain_segments
from sharding.ranks import agreed, exchange, machine, rank
from sharding.send.buckets import BucketPlan
from sharding.send.source import FsdpWeightSource, ShardedSource
from sharding.transports.base import Transfer, Transport, WorkerCall
from sharding.transports.staged import Staged
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter, first_names
from sharding.wire.staging import STAMP_BYTES, MemoryFile, bytes_of, cuda_handle, stamp, wait_for_writes


class Export:
    """This rank's shards, in memory that other processes of its machine can map for as long as the
    run lasts.

    On CPU the shards are moved into a memory file; on CUDA they stay where they are, in plain
    segments of torch's allocator (see `trainer.build`). Behind them lies a stamp, see `Pull`.
    """

    def __init__(
        self, shards: Callable[[], dict[str, Tensor]], aliases: Iterable[Tensor], device: torch.device
    ) -> None:
        """Make the shards readable by other processes. `shards` returns parameter -> this rank's
        current part of it; `aliases` are all tensors that share memory with the parts. Raises
        SyncError if the system does not have that much shared memory, or if a shard cannot be
        moved.
        """
        self._shards = shards
        self._device = device
        storages: dict[int, list[Tensor]] = {_storage(part): [] for part in self._held().values()}
        for tensor in aliases:
            if (address := tensor.untyped_storage().data_ptr()) in storages:
                storages[address].append(tensor)
        if unmoved := [name for name, part in self._held().items() if not storages[_storage(part)]]:
            raise SyncError(f"the policy does not say what shares the memory of {first_names(unmoved)}")
        with plain_segments():
            self._stamp = torch.zeros(STAMP_BYTES, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._move(list(storages.values()))
        parts = self._held()
        by_address = {_storage(part): part.untyped_storage() for part in parts.values()}
        self._storages = [*by_address.values(), self._stamp.untyped_storage()]
        numbers = {address: number for number, address in enumerate(by_address)}
        self._addresses = self._where()
        self.ranges = {
            n: [numbers[_storage(p)], p.data_ptr() - _storage(p), p.numel()] for n, p in parts.items()
        }

    def _held(self) -> dict[str, Tensor]:
        """Return the shards that are not empty, as they are now."""
        return {name: part for name, part in self._shards().items() if part.numel()}

    @torch.no_grad()
    def _move(self, storages: list[list[Tensor]]) -> None:
        """Move the tensors of each storage into a memory file of the same content."""
        sizes = [tensors[0].untyped_storage().nbytes() for tensors in storages]
        remedy = "set sync.way to staged"
        self._file = MemoryFile("hotbunk-shards", [*sizes, STAMP_BYTES], "the policy's shards", remedy)
        *memory, self._stamp = self._file.tensors
        for tensors, new in zip(storages, memory, strict=True):
            new.copy_(bytes_of(tensors[0].untyped_storage()))
            for tensor in tensors:
                tensor.data = new.view(tensor.dtype).as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )

    def handle(self) -> dict[str, Any]:
        """Return what `open_memory` needs in one other process: the shards' storages and the stamp.
        A process on CUDA needs a handle of its own, since torch counts one user of each.
        """
        return self._file.handle if self._device.type == "cpu" else cuda_handle(self._storages)

    def stamp(self, number: int) -> None:
        """Write the number that readers compare with the announced one."""
        stamp(self._stamp, number)
        wait_for_writes(self._device)

    def moved(self) -> list[str]:
        """Return the parameters whose shards are no longer where they were exported, as FSDP2 pads
        some anew and an offloaded one gets other memory.
        """
        now = self._where()
        return [name for name, address in self._addresses.items() if now.get(name) != address]

    def _where(self) -> dict[str, tuple[int, int]]:
        return {name: (part.data_ptr(), part.numel()) for name, part in self._held().items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Pull(Staged):
    """A transport by which workers read the shards of the ranks that hold a copy of the model, on
    their own machine.

    The stamp behind a rank's shards is that of the update while workers may read, and 0 while the
    rank may write: the step of an optimizer sets it to 0 first. Workers look at it before they read
    and afterwards, so they find out that they have mapped other memory than was meant, and that a
    rank wrote while they read.
    """

    def __init__(
        self,
        device: torch.device,
        source: FsdpWeightSource,
        aliases: Iterable[Tensor],
        writers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Export the shards of `source`. `aliases`: all tensors that share memory with its
        parameters; `writers`: the optimizers that change these.
        """
        super().__init__(device)
        self._source = source
        self._held = source.in_memory()
        self.export = Export(self._held.shards, aliases, device)
        for writer in writers:
            writer.register_step_pre_hook(lambda *_: self.export.stamp(0))
        self._sources: list[dict[str, Any]] = []
        self._parts: dict[str, list[list[Any]]] = {}
        self._added: dict[str, list[Any]] = {}

    @classmethod
    def for_run(
        cls, device: torch.device, source: ShardedSource, policy: Any, folder: Path, timeout: float
    ) -> "Transport":
        """Build the transport for an FSDP2 or ZeRO-3 policy, whose optimizer is the only writer."""
        assert isinstance(source, FsdpWeightSource)
        return cls(device, source, policy.shard_tensors(), [policy.optimizer])

    def connect(self, call: WorkerCall | None) -> None:
        """Exchange the handles of the shards. Raises SyncError: ranks that share a weight are on
        several machines.
        """
        shards = self._held.shards()
        holders = {name: self._held.holders(name) for name in shards}
        here = sorted({rank(), *(who for some in holders.values() for who in some)})
        description = {
            "machine": machine(),
            "handles": {str(reader): self.export.handle() for reader in here},
            "ranges": {
                name: [*stretch, *self._elements(name)] for name, stretch in self.export.ranges.items()
            },
        }
        ranks = exchange(description)
        with agreed("looking for the shards"):
            if away := [who for who in here if ranks[who]["machine"] != machine()]:
                raise SyncError(
                    f"shards of rank {away[0]} are on another machine: set sync.way to staged"
                )
        self._sources = [{"rank": who, "handle": ranks[who]["handles"][str(rank())]} for who in here]
        ranges = {who: ranks[who]["ranges"] for who in here}
        held = {
            parameter.name: parameter
            for parameter in self._held.parameters()
            if parameter.name in shards
        }
        parts: dict[str, list[list[Any]]] = {name: [] for name in held}
        for name, parameter in held.items():
            for who in holders[name]:
                if name in ranges[who]:
                    parts[name] += _parts(parameter, here.index(who), *ranges[who][name])
        additions = self._source.additions()
        added: dict[str, list[Any]] = {}
        for name, (scale, b, a) in additions.items():
            if {name, b, a} <= parts.keys() and len(held[name].pieces) == 1:
                factors = [[held[factor].pieces[0].shape, parts[factor]] for factor in (b, a)]
                added[name] = [held[name].pieces[0].name, scale, *factors]
        self._added = added
        # A weight with an addition is read only where the workers can add it
        self._parts = {
            parameter.name: parts[parameter.name]
            for parameter in self._source.parameters()
            if parameter.name in (added if parameter.name in additions else parts)
        }

    def _elements(self, name: str) -> tuple[int, str]:
        """Return the number of this rank's first element of a parameter, and the dtype it is kept
        in.
        """
        first, values = self._held.own_values(name)
        return first, str(values.dtype).removeprefix("torch.")

    def not_pulled(
        self, parameters: list[SourceParameter], unsplit: Collection[str]
    ) -> list[SourceParameter]:
        """Return the parameters that cannot be pulled: those with a weight in `unsplit`, and those
        that no rank holds as runs of elements.
        """
        staged = []
        for parameter in parameters:
            whole = any(piece.name in unsplit for piece in parameter.pieces)
            if whole or parameter.name not in self._parts:
                staged.append(parameter)
        return staged

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Make the staging buffers, if there is anything to stage."""
        if plan.buckets:
            super().begin(version, plan, read)
        else:
            super().abort("")

    def transfer(self, update: Transfer) -> None:
        """Stage the weights that loaders need whole, and let workers that have a record read all
        others. Raises RemoteError: a shard is not in the memory that workers map.
        """
        with agreed("exporting the shards"):
            if moved := self.export.moved():
                raise SyncError(
                    f"{first_names(moved)} left the memory that workers map: set sync.way to staged"
                )
            # Workers may read once all ranks have come here
            self.export.stamp(_mark(update.session, rank()))
        unsplit = update.needed_whole()
        staged = update.parameters if unsplit is None else self.not_pulled(update.parameters, unsplit)
        update.push(staged, unsplit)
        if unsplit is not None:
            update.post("pull", **self.message(update.session, {parameter.name for parameter in staged}))

    def message(self, session: int, staged: Collection[str]) -> dict[str, Any]:
        """Return what this rank's worker needs to read all parameters but those `staged`: the
        ranks' memory with the stamp it bears (`sources`); of each weight the elements that a rank
        holds, and where (`parts`); and for those with an adapter its scale, and of B and A the
        shapes and parts (`added`).
        """
        sources = [source | {"stamp": _mark(session, source["rank"])} for source in self._sources]
        pulled = {name: some for name, some in self._parts.items() if name not in staged}
        added = [adapter for name, adapter in self._added.items() if name in pulled]
        return {
            "sources": sources,
            "parts": [part for some in pulled.values() for part in some],
            "added": added,
        }

    def finish(self, release: bool) -> None:
        """Give the buffers back, and take the stamp off the shards: nobody may read them from here
        on.
        """
        super().finish(release)
        self.export.stamp(0)

    def abort(self, reason: str) -> None:
        """Take the stamp off the shards, too."""
        super().abort(reason)
        self.export.stamp(0)


def _mark(session: int, who: int) -> int:
    """Return the stamp of a rank in an update, which no other rank and no other update has."""
    return session << 20 | who


def _parts(
    parameter: SourceParameter,
    source: int,
    storage: int,
    offset: int,
    count: int,
    first: int,
    dtype: str,
) -> Iterator[list[Any]]:
    """Yield what one rank holds of the weights in a parameter: name, dtype, first element, number
    of elements, numbers of the source and of its storage, and the byte there. Padding behind the
    parameter is left out.
    """
    for piece in parameter.pieces:
        start = piece.offset // piece.itemsize
        begin = max(first, start)
        end = min(first + count, start + piece.nbytes // piece.itemsize)
        if begin < end:
            at = offset + (begin - first) * getattr(torch, dtype).itemsize
            yield [piece.name, dtype, begin - start, end - begin, source, storage, at]
