"""A transport through staging memory, which a rank and its worker have both mapped (`sync.way:
staged`).
"""

from pathlib import Path
from typing import Any

import torch

from sharding.send.buckets import BucketPlan
from sharding.send.source import ShardedSource
from sharding.transports.base import Transport
from sharding.wire.staging import Staging, make_staging, wait_for_writes, with_stamp


class Staged(Transport):
    """A transport through memory that the rank and its worker, on the same device, have both
    mapped.

    There is nothing to wait for: a worker answers when it has read a bucket.
    """

    reader = "staged"
    cuts = True

    def __init__(self, device: torch.device) -> None:
        self.buffers = []
        self._device = device
        self._staging: Staging | None = None

    @classmethod
    def for_run(
        cls, device: torch.device, source: ShardedSource, policy: Any, folder: Path, timeout: float
    ) -> "Transport":
        """Build the transport for this rank's device."""
        return cls(device)

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Make the buffers, or keep those of the last update if they are of the same size."""
        if self.buffers and self.buffers[0].nbytes != with_stamp(plan.capacity):
            self.abort("")
        if self._staging is None:
            self._staging = make_staging(plan.capacity, self._device)
            self.buffers = self._staging.buffers
        if read:
            self._staging.export()

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Wait until the bucket is written, and return the handle by which the worker maps the
        buffers.
        """
        assert self._staging is not None
        wait_for_writes(self._device)
        return {"handle": self._staging.handle}

    def finish(self, release: bool) -> None:
        """Free the buffers if `release`."""
        if release:
            Staged.abort(self, "")

    def abort(self, reason: str) -> None:
        """Free the buffers."""
        self.buffers = []  # before the memory is given back
        if self._staging is not None:
            self._staging.close()
            self._staging = None
