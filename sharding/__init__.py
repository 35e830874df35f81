"""Both ends of the weight path: sources and plan in the trainer, receiver in the vLLM worker, one manager over them.

Names are loaded on first use: `worker_extension` is imported inside vLLM's workers, which need none of the trainer's
side.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BucketPlan": "send.plan",
    "CollectiveSender": "apart.broadcast",
    "FsdpWeightSource": "send.source",
    "ShardingManager": "manager",
    "StorageWriter": "apart.storage",
    "StreamSource": "send.source",
    "SyncError": "wire.channel",
    "VllmInternalWorkerExtension": "worker.extension",
    "WeightSource": "send.source",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
