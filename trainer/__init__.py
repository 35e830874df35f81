"""The trainer: configuration, data, rewards, algorithms, policies and the loop. Importing it does
not load torch.
"""

from importlib import import_module
from typing import Any

import generation  # noqa: F401  # before Transformers: it makes way for torchvision

_HOMES = {
    "Datum": "trainer.training.data",
    "Policy": "trainer.types",
    "DeepSpeedPolicy": "trainer.policy.deepspeed",
    "FsdpPolicy": "trainer.policy.fsdp",
    "PreparedPolicy": "trainer.policy.prepared",
    "RLTrainer": "trainer.loop",
    "TrainConfig": "trainer.config.schema",
    "Training": "trainer.training.training",
    "UserError": "trainer.errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line and reward workers start without
    torch.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
