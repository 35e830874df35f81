"""The parts of a Transformers model: decoder layers, and what only images pass, where it sees."""

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def sees(config: PretrainedConfig) -> bool:
    """True if the model that a config.json describes has a part for images."""
    return getattr(config, "vision_config", None) is not None


def decoder(model: PreTrainedModel) -> Any:
    """The module that has the decoder layers: the trunk itself, or the language model in one that sees."""
    return model.base_model.get_decoder() if sees(model.config) else model.base_model


def seeing(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that only images pass, by name: the encoder and the projection of its features; {} in text models."""
    if not sees(model.config):
        return {}
    own = {module for module in model.base_model.children() if module is not decoder(model)}
    return {name: module for name, module in model.named_modules() if module in own}


def encoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that only images pass."""
    modules = (module for part in seeing(model).values() for module in part.modules())
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
