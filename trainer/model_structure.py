"""The parts of a Transformers model, and the floating-point operations of its passes, for counts and estimates alike.

The parts: decoder layers, and what only images pass, where it sees.

Operations are counted as by Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) for the model FLOPs utilisation
(MFU): products of matrices, two for each multiplication; recomputation in backward does not count. Unlike there,
attention is causal and within each sequence, and the output head runs at targets alone, as it does here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from generation.engine.settings import head_widths
from sharding.send.source import whole_shape
from trainer.errors import UserError


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


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of the matrices that a token is multiplied by."""

    # elements of the matrices that every token passes; of a mixture's experts, those that a token is sent to
    trunk: int
    trunk_learned: int  # the elements among them that are trained
    head: int  # elements of the output head, which a target passes
    head_learned: int  # the same, or 0 where it is frozen
    attention: int  # layers * heads * size of a head, the mean of a key's and a value's
    seeing: int = 0  # elements of the matrices that a patch of an image passes; its attention is not counted
    seeing_learned: int = 0  # the elements among them that are trained
    # as many tokens more than its own the activations of an image's token are worth: those of the encoder
    image_token: float = 0.0

    def forward(self, tokens: float, targets: float, pairs: float, patches: float = 0) -> float:
        """Operations of a forward pass over this many tokens, targets, pairs (`attended`) and patches of images."""
        seen = 2.0 * self.seeing * patches
        return 2.0 * (self.trunk * tokens + self.head * targets) + 4.0 * self.attention * pairs + seen

    def backward(self, tokens: float, targets: float, pairs: float, patches: float = 0) -> float:
        """Operations of the backward pass: gradients of all inputs, and of the matrices that are learned."""
        learned = 2.0 * (self.trunk_learned * tokens + self.head_learned * targets + self.seeing_learned * patches)
        seen = 2.0 * self.seeing * patches * bool(self.seeing_learned)  # nothing below it learns otherwise
        return learned + 2.0 * (self.trunk * tokens + self.head * targets) + 8.0 * self.attention * pairs + seen

    def tokens_worth(self, length: int) -> int:
        """Of how many tokens the trunk's products, without attention, are as much work as a sequence of this length.

        Example: in Qwen2.5's 7B model a sequence of 64k tokens is worth about 128k, and two of 32k together 96k.
        """
        return length + self.attention * length * (length + 1) // self.trunk  # 4 * attention * pairs / (2 * trunk)


def attended(lengths: Sequence[float]) -> float:
    """The number of pairs of a query and a key that it sees, in sequences of these lengths; windows are ignored."""
    return sum(length * (length + 1) / 2 for length in lengths)


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """The sizes of a Transformers model, with data or without, before it is sharded or under ZeRO."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(embedding.weight)} | ({id(head.weight)} if head is not None else set())
    of_images = [p for part in seeing(model).values() for p in part.parameters() if len(whole_shape(p)) > 1]
    outside = ends | set(map(id, of_images))
    trunk = learned = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in outside and len(shape := whole_shape(parameter)) > 1:
            experts = shape[0] if ".experts." in name and len(shape) > 2 else 0  # of which a token meets some
            share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
            used = int(shape.numel() * share)
            trunk, learned = trunk + used, learned + used * parameter.requires_grad
    size = 0 if head is None else whole_shape(head.weight).numel()
    # Some families have other names for these two in config.json.
    sizes = config.to_dict() | {name: getattr(config, name) for name in ("hidden_size", "num_attention_heads")}
    return ModelFlops(
        trunk=trunk,
        trunk_learned=learned,
        head=size,
        head_learned=size if size and head.weight.requires_grad else 0,
        attention=config.num_hidden_layers * config.num_attention_heads * sum(head_widths(sizes)) // 2,
        seeing=sum(whole_shape(p).numel() for p in of_images),
        seeing_learned=sum(whole_shape(p).numel() for p in of_images if p.requires_grad),
    )


@dataclass
class Work:
    """The work that a model has done on this rank so far."""

    of: ModelFlops
    tokens: int = field(default=0, init=False)  # the number it has learned from, those of prompts included
    flops: float = field(default=0.0, init=False)  # its operations, for these tokens and for those it only scored

    def count(self, tokens: int, targets: int, pairs: float, patches: int = 0) -> None:
        """Count a forward pass, arguments as `ModelFlops.forward`'s, and a backward pass if gradients are recorded."""
        amount = (tokens, targets, pairs, patches)
        self.flops += self.of.forward(*amount)
        if torch.is_grad_enabled():
            self.flops += self.of.backward(*amount)
            self.tokens += tokens


def freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    """Let the parameters that policy.freeze names keep their values: `vision`, or patterns of modules or parameters.

    Raises UserError where a pattern fits nothing, or nothing is left to learn.
    """
    of_images = {parameter for module in seeing(model).values() for parameter in module.parameters()}
    for pattern in patterns:
        named = {p for name, p in model.named_parameters() if fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*")}
        found = of_images if pattern == "vision" else named
        if not found:
            raise UserError(f"policy.freeze: {type(model).__name__} has nothing that {pattern} fits: leave it out")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"policy.freeze leaves {type(model).__name__} nothing to learn: name less")
