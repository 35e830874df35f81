"""The worker's end of updates by patches (`sharding.transports.delta`): a bucket is restored from
this worker's own weights and a patch.
"""

from typing import Any

import torch

from sharding.wire.channel import SyncError
from sharding.wire.patches import apply_patch
from sharding.worker.receiver import Buckets, parts_of, views_of


class PatchedBuckets:
    """Buckets that may arrive as patches of their former content. It implements `receiver.Buckets`.

    A worker keeps no copy of a bucket: it reads the former content back from its weights, with its
    record of the loaders' copies.
    """

    def __init__(self, buckets: Buckets, worker: Any) -> None:
        """Receive buckets and patches from `buckets`, which takes a patch for a shorter bucket."""
        self.ahead = buckets.ahead
        self.opened = buckets.opened
        self.closed = buckets.closed
        self._buckets = buckets
        self._worker = worker
        self._memory = torch.empty(0, dtype=torch.uint8)

    def expect(self, message: dict[str, Any]) -> None:
        """Note that a bucket, or a patch in its place, is announced."""
        self._buckets.expect(_as_sent(message))

    def bucket(self, message: dict[str, Any]) -> torch.Tensor:
        """Return the bucket that a message announces, restored if a patch has arrived. Raises
        SyncError if this worker has no complete record.
        """
        received = self._buckets.bucket(_as_sent(message))
        return self._restored(received, message) if "patch" in message else received

    def _restored(self, patch: torch.Tensor, message: dict[str, Any]) -> torch.Tensor:
        """Return a bucket's present content: its weights as this worker holds them, changed by a
        patch.
        """
        recording = self._worker.hotbunk_recording
        if recording is None or not recording.complete:
            raise SyncError("a patch arrived, but this worker has no record of where weights are")
        if self._memory.nbytes < message["nbytes"]:
            self._memory = patch.new_empty(message["nbytes"])
        bucket = self._memory[: message["nbytes"]]
        recording.recall(views_of(bucket, message), parts_of(bucket, message))
        apply_patch(patch, bucket)
        return bucket

    def close(self, reason: str | None = None) -> None:
        """Release the memory of the buckets inside."""
        self._buckets.close(reason)


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message of the bytes that travel: those of the bucket, or of the patch in its
    place.
    """
    return message | {"nbytes": message.get("patch", message["nbytes"])}
