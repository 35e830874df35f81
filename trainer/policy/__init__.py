"""The policy: the model to train, sharded over the ranks."""

import torch

from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy.fsdp import FrozenPolicy, FsdpPolicy
from trainer.policy.in_place import InPlacePolicy
from trainer.policy.lora import NO_ADAPTERS
from trainer.types import LossFn, Outputs, Policy, Scorer, UpdateStats

__all__ = [
    "FrozenPolicy",
    "FsdpPolicy",
    "InPlacePolicy",
    "LossFn",
    "Outputs",
    "Policy",
    "Scorer",
    "UpdateStats",
    "make_policy",
]


def make_policy(
    model: ModelConfig,
    policy: PolicyConfig,
    device: torch.device,
    total_updates: int,
    lora: LoraConfig = NO_ADAPTERS,
    value_head: bool = False,
    in_place: bool = False,
) -> Policy:
    """Make the policy on the backend that policy.backend names; a value head is possible on FSDP2
    only.

    With `in_place`, the policy can compute with an engine's weights.
    """
    if in_place:
        return InPlacePolicy(model, policy, device, total_updates, value_head=value_head)
    if policy.backend == "fsdp":
        return FsdpPolicy(model, policy, device, total_updates, lora=lora, value_head=value_head)
    from trainer.policy.deepspeed import DeepSpeedPolicy  # importing DeepSpeed takes seconds

    return DeepSpeedPolicy(model, policy, device, total_updates, lora)
