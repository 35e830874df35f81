"""Generation on vLLM: engines with an explicit life cycle, sampling that hides nothing, rollouts.

Nothing here imports the trainer or the weight path. The names below are loaded on first use, so that importing the
package (a reward worker does, the command line does) costs nothing.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "EngineLifecycle": "engine_state",
    "EngineSettings": "settings",
    "EngineStateError": "engine_state",
    "EngineThread": "event_loop",
    "SamplingSettings": "sampling",
    "Trajectory": "trajectory",
    "VllmAsyncGenerationWorker": "worker_async",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
