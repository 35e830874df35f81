"""The policy: the model that is trained, sharded over the ranks."""

from trainer.policy.base import LossFn, Policy, UpdateStats
from trainer.policy.fsdp import FsdpPolicy

__all__ = ["FsdpPolicy", "LossFn", "Policy", "UpdateStats"]
