"""How the bytes of weights get from the ranks to the workers: what `sync.way` chooses. Messages go their own way.

Engines on the trainer's devices read the trainer's staging buffers (`Staged`), or share its weights (`ZeroCopy`).
`sharding.apart` has the ways that need no common memory: `Broadcast` and `Storage`.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from sharding.send.plan import BucketPlan
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter
from sharding.wire.staging import Staging, make_staging, open_memory, wait_for_writes, with_stamp

Call = Callable[..., "Future[list[dict[str, Any]]]"]
"""(method, *arguments): starts a method of the worker extension on all workers of a leader's engine; their outcomes."""


class Way(Protocol):
    """The trainer's half of a way; the worker's is a `sharding.worker.receiver.Buckets`.

    Every rank makes the same calls in the same order. An error of one rank is raised there, and the ranks agree on it
    afterwards; after any error comes `abort`, and the next update begins anew.

    Attributes:
        reader: the worker's half: "staged", "broadcast", "storage", or an import string.
        cuts: a weight larger than a bucket may travel in parts.
        in_place: the workers read the trainer's own memory, so that no bucket is sent.
        shares: the engine's weights are, or will be, the trainer's too: they stay where they are while it sleeps.
    """

    reader: str
    cuts: bool
    in_place: bool
    shares: bool

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Two of them (uint8), each of the plan's capacity and `STAMP_BYTES`, between `begin` and `finish`."""

    def connect(self, call: Call | None) -> None:
        """Before the first update, and before the next after one that broke off; `call` on leaders only."""

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Have the buffers ready for an update. `read`: this rank's worker is going to read them."""

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Let the workers have a bucket, which `gather` has filled a buffer with.

        Args:
            kind: "bucket", or "compare" for weights that are sent again to be compared.
            fields: of its message: `buffer`, `nbytes`, `stamp`, and what it holds (`pieces`, `stretches`).
            failed: this rank's worker gets no more messages.

        Returns:
            Further fields of the message: where the worker finds the bucket.
        """

    def wait(self, buffer: int) -> None:
        """Return when a buffer may be filled again; this rank's worker has answered already."""

    def finish(self, release: bool) -> None:
        """Every worker has everything. `release`: give the buffers back."""

    def abort(self, reason: str) -> None:
        """An update broke off, or the run ends; never raises."""


class Staged:
    """Buckets in memory that the rank and its worker, on the same device, have both mapped. See `Way`."""

    reader, cuts, in_place, shares = "staged", True, False, False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: Staging | None = None

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [] if self._staging is None else self._staging.buffers

    def connect(self, call: Call | None) -> None:
        """See `Way`."""

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """See `Way`. Buffers of the last update are kept where they are as large as these."""
        if self.buffers and self.buffers[0].nbytes != with_stamp(plan.capacity):
            self.abort("")
        if self._staging is None:
            self._staging = make_staging(plan.capacity, self._device)
        if read:
            self._staging.export()

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        assert self._staging is not None
        wait_for_writes(self._device)
        return {"handle": self._staging.handle}

    def wait(self, buffer: int) -> None:
        """See `Way`: the worker's answer says it."""

    def finish(self, release: bool) -> None:
        if release:
            Staged.abort(self, "")

    def abort(self, reason: str) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None


class ZeroCopy(Staged):
    """One memory for the weights of one rank and one worker: after the first update an optimizer step is the sync.

    Three ways to have it were weighed: the engine takes over memory of the trainer's (its CUDA graphs were captured
    with addresses of its own), one piece of memory mapped twice through the driver (vLLM's sleeping pool can be mapped
    anew, but not exported), and this one: the worker hands out its parameters, and the trainer's become views of them.
    """

    shares = True

    def __init__(
        self,
        device: torch.device,
        parameters: list[SourceParameter],
        compute_in: Callable[[dict[str, torch.Tensor]], None],
        timeout: float,
    ) -> None:
        """`compute_in` takes the engine's memory of each parameter, flat, for the trainer to compute in from then on.

        The engine must have one worker, with `shared_weights` set; `timeout` is of the wait for it, s.
        """
        super().__init__(device)
        self.in_place = False
        self._parameters, self._compute_in, self._timeout = parameters, compute_in, timeout
        self._call: Call | None = None

    def connect(self, call: Call | None) -> None:
        self._call = call

    def finish(self, release: bool) -> None:
        """See `Way`. The engine holds the trainer's weights by now, so they can become one with them."""
        super().finish(release=True)
        if self.in_place:
            return
        assert self._call is not None
        shared = self._call("hotbunk_share_weights").result(self._timeout)[0]
        storages = open_memory(shared["handle"], self._device)
        self._compute_in({p.name: memory_of(p, shared["places"], storages) for p in self._parameters})
        wait_for_writes(self._device)
        self.in_place = True

    def abort(self, reason: str) -> None:
        """See `Way`. The next update brings every weight, and shares them again."""
        super().abort(reason)
        self.in_place = False


def memory_of(
    parameter: SourceParameter, places: dict[str, tuple[int, int]], storages: list[torch.Tensor]
) -> torch.Tensor:
    """A parameter's memory in the engine, flat, in the engine's dtype.

    Args:
        places: weight -> number of the storage it lies in, and the byte at which it begins there. A parameter of two
            weights of 288 and 192 bytes may lie at (0, 512) and (0, 800), which makes one run.

    Raises:
        SyncError: the parameter consists of weights that the engine keeps in different places.
    """
    starts = {(places[p.name][0], places[p.name][1] - p.offset) for p in parameter.pieces}
    if len(starts) > 1:
        raise SyncError(
            f"the engine keeps the parts of {parameter.name} apart, so the trainer cannot compute with it: "
            "set sync.way to staged"
        )
    number, start = starts.pop()
    return storages[number][start : start + parameter.nbytes].view(getattr(torch, parameter.pieces[0].dtype))
