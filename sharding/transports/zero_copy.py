"""A transport without copies: trainer and engine share one memory (`sync.way: zero_copy`), so that
an optimizer step is at once the weight sync.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sharding.send.source import ShardedSource
from sharding.transports.base import Transfer, Transport, WorkerCall
from sharding.transports.staged import Staged
from sharding.wire.channel import SyncError
from sharding.wire.manifest import SourceParameter
from sharding.wire.staging import open_memory, wait_for_writes


class ZeroCopy(Staged):
    """One memory for the weights of one rank and one worker. After the first update, an optimizer
    step changes the engine's weights, too. The few weights of which the engine keeps something
    else, such as -exp(A_log), are still sent.

    The worker hands out the memory of its parameters, and the trainer's parameters become views of
    it. Two alternatives were rejected. The engine cannot take over the trainer's memory, since its
    CUDA graphs were captured with other addresses. And memory cannot be mapped twice through the
    CUDA driver, since vLLM's sleeping pool can be mapped anew, but not exported.
    """

    shares = True

    def __init__(
        self,
        device: torch.device,
        parameters: list[SourceParameter],
        compute_in: Callable[[dict[str, torch.Tensor]], None],
        timeout: float,
    ) -> None:
        """Share the memory of `parameters` after the first update. `compute_in` is then called with
        parameter -> its memory in the engine, flat, which the trainer computes in from then on. The
        engine must have one worker, with `shared_weights` set; the wait for it takes at most
        `timeout` seconds.
        """
        super().__init__(device)
        self.in_place = False
        self._sent: list[SourceParameter] = []
        self._parameters = parameters
        self._compute_in = compute_in
        self._timeout = timeout
        self._call: WorkerCall | None = None

    @classmethod
    def for_run(
        cls, device: torch.device, source: ShardedSource, policy: Any, folder: Path, timeout: float
    ) -> "Transport":
        """Build the transport for all parameters of the policy."""
        return cls(device, source.parameters(), policy.compute_in, timeout)

    def connect(self, call: WorkerCall | None) -> None:
        """Keep `call`, by which the worker is asked for its memory after the first update."""
        self._call = call

    def transfer(self, update: Transfer) -> None:
        """Bring the weights; once the memory is shared, only tell the worker that they are new."""
        if self.in_place:
            if self._sent:
                update.push(self._sent, None)
            wait_for_writes(self._device)  # the worker reads the memory at once
            update.post("in_place")
        else:
            update.push_all()

    def finish(self, release: bool) -> None:
        """Move the trainer's computation into the engine's memory after the first update, when it
        holds the weights.
        """
        super().finish(release=True)
        if self.in_place:
            return
        assert self._call is not None
        shared = self._call("hotbunk_share_weights").result(self._timeout)[0]
        starts = shared["places"]
        storages = open_memory(shared["handle"], self._device)
        self._sent = []
        shares = []
        for parameter in self._parameters:
            if all(piece.name in starts for piece in parameter.pieces):
                shares.append(parameter)
            else:
                self._sent.append(parameter)
        self._compute_in({p.name: memory_of(p, starts, storages) for p in shares})
        wait_for_writes(self._device)
        self.in_place = True

    def abort(self, reason: str) -> None:
        """Stop sharing; the next update brings every weight, and shares them again."""
        super().abort(reason)
        self.in_place = False


def memory_of(
    parameter: SourceParameter, starts: dict[str, tuple[int, int]], storages: list[torch.Tensor]
) -> torch.Tensor:
    """Return a parameter's memory in the engine, flat, in the engine's dtype. `starts`: weight ->
    number of the storage it lies in, and the byte at which it begins there. A parameter of two
    weights of 288 and 192 bytes may lie at (0, 512) and (0, 800), which makes one run. Raises
    SyncError: the parameter consists of weights that the engine keeps in different places.
    """
    runs = {(starts[p.name][0], starts[p.name][1] - p.offset) for p in parameter.pieces}
    if len(runs) > 1:
        raise SyncError(
            f"the engine keeps the parts of {parameter.name} apart, so the trainer cannot compute with "
            "it: set sync.way to staged"
        )
    number, start = runs.pop()
    return storages[number][start : start + parameter.nbytes].view(
        getattr(torch, parameter.pieces[0].dtype)
    )
