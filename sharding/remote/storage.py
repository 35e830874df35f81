"""Weights through a folder (`sharding.worker.weight_folder`), for engines that share only a disk
with the trainer.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sharding.ranks import exchange, rank
from sharding.report import SyncReport, SyncSettings
from sharding.send.buckets import BucketPlan
from sharding.send.source import ShardedSource, WeightSource
from sharding.transports.base import Transport
from sharding.update import Update
from sharding.wire.channel import SyncError
from sharding.wire.manifest import manifest_of
from sharding.wire.staging import local_buffers, with_stamp
from sharding.worker.weight_folder import FORMAT, MANIFEST, SLOTS, digest, locked_slot, read_manifest
from sharding.workers import Workers

_CPU = torch.device("cpu")


class Storage(Transport):
    """A folder to which rank 0 writes each bucket, and from which all workers read it. See
    `Transport`.

    A weight is never cut: readers other than this run's workers may need it whole. Weights that are
    sent again to be compared lie behind the update in the slot, and are cut off before the slot
    becomes the current one.
    """

    reader = "storage"

    def __init__(self, folder: Path | str, device: torch.device, timeout: float) -> None:
        """Readers get `timeout` seconds to leave a slot. Workers on other machines must see the
        same folder.
        """
        self.buffers: list[torch.Tensor] = []
        self._folder = Path(folder)
        self._device = device
        self._timeout = timeout
        self._slot = ""
        self._fd = -1
        self._end = 0
        self._content: dict[str, Any] = {}

    @classmethod
    def for_run(
        cls, device: torch.device, source: ShardedSource, policy: Any, folder: Path, timeout: float
    ) -> "Transport":
        """Build the transport through the folder `weights` in the run's folder."""
        return cls(folder / "weights", device, timeout)

    def begin(self, version: int, plan: BucketPlan, read: bool) -> None:
        """Open and lock the free slot. Raises TimeoutError: a reader still has it."""
        self.buffers = local_buffers(self.buffers, with_stamp(plan.capacity), self._device)
        if rank() != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        chosen, self._fd = locked_slot(
            self._folder, partial(_free_slot, self._folder), flags, self._timeout
        )
        self._slot = chosen["slot"]
        os.ftruncate(self._fd, 0)
        self._end = 0
        weights = manifest_of(plan.parameters)
        self._content = {
            "format": FORMAT,
            "version": version,
            "slot": self._slot,
            "weights": weights,
            "buckets": [],
        }

    def send(self, kind: str, fields: dict[str, Any], failed: bool) -> dict[str, Any]:
        """Write the bucket. Collective: workers of all ranks learn where rank 0 has written it.
        Raises SyncError: it could not be written, on all ranks.
        """
        record: dict[str, Any] = {}
        if rank() == 0 and not failed:
            try:
                record = self._write(self.buffers[fields["buffer"]][: fields["nbytes"]].cpu())
                if kind == "bucket":
                    self._content["buckets"].append(record | {"pieces": fields["pieces"]})
                record["path"] = str((self._folder / self._slot).resolve())
                record |= {"number": len(self._content["buckets"]), "timeout_s": self._timeout}
            except OSError as error:
                record = {"error": f"{self._folder / self._slot} cannot be written: {error}"}
        record = exchange(record)[0]
        if "path" not in record:
            raise SyncError(record.get("error", "rank 0 has failed before"))
        return record

    def _write(self, memory: torch.Tensor) -> dict[str, Any]:
        data = memory.numpy().data
        record = {"offset": self._end, "nbytes": len(data), "digest": digest(data)}
        while data:
            written = os.pwrite(self._fd, data, self._end)
            self._end += written
            data = data[written:]
        return record

    def finish(self, release: bool) -> None:
        """Make this update the current one of the folder."""
        if self._fd >= 0:
            buckets = self._content["buckets"]
            end = buckets[-1]["offset"] + buckets[-1]["nbytes"] if buckets else 0
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
            draft = self._folder / f"{MANIFEST}.tmp"
            with draft.open("w", encoding="utf-8") as file:
                json.dump(self._content, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._folder / MANIFEST)
        self._leave(release)

    def abort(self, reason: str) -> None:
        """Leave the slot; the previous update stays the current one of the folder."""
        self._leave(release=True)

    def _leave(self, release: bool) -> None:
        if release:
            self.buffers = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class StorageWriter:
    """Writes updates for engines that this run has not started. Every rank makes the same calls;
    rank 0 writes.
    """

    def __init__(
        self,
        folder: Path | str,
        source: WeightSource,
        device: torch.device = _CPU,
        bucket_bytes: int = 512 << 20,
        timeout: float = 300.0,
    ) -> None:
        """Write the weights of `source`, gathered on `device`; readers get `timeout` seconds to
        leave a slot.
        """
        self._folder = Path(folder)
        settings = SyncSettings("off", bucket_bytes, timeout)
        self._update = Update(source, Storage(folder, device, timeout), settings)

    def write(self, version: int) -> Path:
        """Write an update. It is the current one when this returns; when it raises, the one before
        still is. Collective over the trainer's ranks. Return the folder, which
        `load_weights_from_storage` takes. Raises RemoteError: on all ranks: the disk is full, or a
        reader has not left the slot in time.
        """
        self._update.run(SyncReport(version), Workers())
        return self._folder


def _free_slot(folder: Path) -> dict[str, str]:
    """Return the slot that the manifest does not name."""
    current = read_manifest(folder)["slot"] if (folder / MANIFEST).exists() else SLOTS[1]
    return {"slot": SLOTS[1 - SLOTS.index(current)]}
