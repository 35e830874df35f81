"""A way of sending weights as a user may write one: each bucket's bytes travel in its own message."""

from typing import Any

import torch

from sharding.send.ways import Staged
from sharding.wire.staging import STAMP_BYTES, stamped_bucket


class InMessages(Staged):
    """The trainer's half of the way."""

    reader = f"{__file__}:BytesOfMessages"

    def __init__(self, device: torch.device, timeout: float) -> None:
        super().__init__(device)

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        bucket = self.buffers[fields["buffer"]][: fields["nbytes"] + STAMP_BYTES]
        return {"bytes": bucket.cpu().numpy().tobytes()}


class BytesOfMessages:
    """The worker's half of the way."""

    ahead = False
    opened = closed = 0

    def __init__(self, worker: Any) -> None:
        self.device = worker.device

    def expect(self, message: dict[str, Any]) -> None:
        pass

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        memory = torch.frombuffer(bytearray(message["bytes"]), dtype=torch.uint8)
        return stamped_bucket(memory, message).to(self.device)

    def close(self, reason: str | None = None) -> None:
        pass
