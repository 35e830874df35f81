"""Both ends of weight updates: the sources of weights and the transports in the trainer, the
receiver in the vLLM worker, and a manager over both.

Names are loaded on first use, since vLLM's workers import the extension and need nothing of the
trainer's end.
"""

from importlib import import_module
from typing import Any

WORKER_EXTENSION = "sharding.worker.extension.VllmInternalWorkerExtension"
"""For `EngineSettings.worker_extension`: vLLM takes the class by its import path."""

SHARING_WORKER = "sharding.worker.sharing_worker.SharingWorker"
"""For `EngineSettings.worker_class`, on CUDA, where the trainer computes with the engine's
weights.
"""

_HOMES = {
    "BucketPlan": "send.buckets",
    "CollectiveSender": "remote.broadcast",
    "FsdpWeightSource": "send.source",
    "ShardingManager": "manager",
    "StorageWriter": "remote.storage",
    "StreamSource": "send.source",
    "SyncError": "wire.channel",
    "SyncSettings": "report",
    "Transport": "transports.base",
    "VllmInternalWorkerExtension": "worker.extension",
    "WeightSource": "send.source",
    "differences": "wire.manifest",
    "stateless_init_process_group": "remote.broadcast",
}
__all__ = sorted(["SHARING_WORKER", "WORKER_EXTENSION", *_HOMES])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
