"""The policy: the model that is trained, sharded over the ranks."""

import torch

from trainer.config import ModelConfig, PolicyConfig
from trainer.policy.base import LossFn, Outputs, Policy, UpdateStats
from trainer.policy.fsdp import FsdpPolicy

__all__ = ["FsdpPolicy", "LossFn", "Outputs", "Policy", "UpdateStats", "make_policy"]


def make_policy(
    model: ModelConfig, policy: PolicyConfig, device: torch.device, total_updates: int, value_head: bool = False
) -> Policy:
    """The policy to train, on the backend that policy.backend names; with a value head on FSDP2 only."""
    if policy.backend == "fsdp":
        return FsdpPolicy(model, policy, device, total_updates, value_head=value_head)
    from trainer.policy.deepspeed import DeepSpeedPolicy  # importing DeepSpeed takes seconds

    return DeepSpeedPolicy(model, policy, device, total_updates)
