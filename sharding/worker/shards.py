"""The shards of a machine's ranks, mapped by a worker that copies weights straight out of them."""

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sharding.wire.channel import SyncError
from sharding.wire.low_rank import Factors
from sharding.wire.manifest import Part
from sharding.wire.staging import open_memory, stamped


class MappedShards:
    """Memory of ranks (`sharding.transports.pull.Export`), mapped from the first update that reads
    it until `close`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles: list[dict[str, Any]] = []
        self._memory: list[list[torch.Tensor]] = []
        self._layout: list[list[Any]] = []
        self._parts: list[Part] = []

    def parts(self, message: dict[str, Any]) -> list[Part]:
        """Return the ranks' parts of each weight: views of their memory, in the dtypes kept there
        (`Pull.message`). Raises SyncError: memory is gone, or does not bear the stamp that was
        announced.
        """
        handles = [source["handle"] for source in message["sources"]]
        if handles != self._handles:
            self.close()
            self._memory = [self._open(source) for source in message["sources"]]
            self._handles = handles
        self.check(message, "is not the memory that was announced")
        if message["parts"] != self._layout:
            self._layout = message["parts"]
            self._parts = [self._part(*part) for part in message["parts"]]
        return self._parts

    def _open(self, source: dict[str, Any]) -> list[torch.Tensor]:
        try:
            return open_memory(source["handle"], self._device)
        except (OSError, RuntimeError) as error:
            raise SyncError(
                f"rank {source['rank']}'s shards are not there to be mapped any more: {error}"
            ) from error

    def factors(self, message: dict[str, Any]) -> dict[str, Callable[[], Factors]]:
        """Return for each weight with an adapter a function that puts its factors together; call
        `parts` first.
        """
        return {name: partial(self._factors, *adapter) for name, *adapter in message["added"]}

    def _factors(self, scale: float, b: list[Any], a: list[Any]) -> Factors:
        return Factors(self._whole(*a), self._whole(*b), scale)

    def _whole(self, shape: list[int], parts: list[list[Any]]) -> torch.Tensor:
        """Return a whole tensor, in float32, whose elements the ranks hold in parts."""
        views = [self._part(*part) for part in parts]
        if (held := sum(values.numel() for _, _, values in views)) != math.prod(shape):
            raise SyncError(f"ranks hold {held} elements of a factor of shape {shape}")
        factor = torch.empty(shape, dtype=torch.float32, device=self._device)
        for _, first, values in views:
            factor.view(-1)[first : first + values.numel()].copy_(values)
        return factor

    def check(self, message: dict[str, Any], complaint: str) -> None:
        """Raise SyncError, with the `complaint`, where a stamp is not the one that was
        announced.
        """
        for source, memory in zip(message["sources"], self._memory, strict=True):
            if (number := stamped(memory[-1])) != source["stamp"]:
                bears = f"(it bears the stamp {number}, not {source['stamp']})"
                raise SyncError(
                    f"what this worker maps of rank {source['rank']}'s shards {complaint} {bears}"
                )

    def _part(
        self, name: str, dtype: str, first: int, count: int, source: int, storage: int, at: int
    ) -> Part:
        kind = getattr(torch, dtype)
        memory = self._memory[source][storage]
        if at + count * kind.itemsize > memory.nbytes:
            raise SyncError(
                f"elements {first} to {first + count} of {name} lie behind the end of a rank's shard"
            )
        return name, first, memory[at : at + count * kind.itemsize].view(kind)

    def close(self) -> None:
        """Release the ranks' memory."""
        if not self._memory:
            return
        self._handles = []
        self._memory = []
        self._layout = []
        self._parts = []
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
