"""The policy: the model that is trained, sharded over the ranks."""

import torch

from trainer.config import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy.base import LossFn, Outputs, Policy, Scorer, UpdateStats
from trainer.policy.fsdp import FrozenPolicy, FsdpPolicy
from trainer.policy.lora import NO_ADAPTERS

__all__ = ["FrozenPolicy", "FsdpPolicy", "LossFn", "Outputs", "Policy", "Scorer", "UpdateStats", "make_policy"]


def make_policy(
    model: ModelConfig,
    policy: PolicyConfig,
    device: torch.device,
    total_updates: int,
    lora: LoraConfig = NO_ADAPTERS,
    value_head: bool = False,
) -> Policy:
    """The policy to train, on the backend that policy.backend names; with a value head on FSDP2 only."""
    if policy.backend == "fsdp":
        return FsdpPolicy(model, policy, device, total_updates, lora=lora, value_head=value_head)
    from trainer.policy.deepspeed import DeepSpeedPolicy  # importing DeepSpeed takes seconds

    return DeepSpeedPolicy(model, policy, device, total_updates, lora)
