"""The parts of a Transformers model, and the number of floating-point operations of its passes.

The parts are the decoder layers and, in a multimodal model, the vision modules.

Operations are counted as by Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) for the
model FLOPs utilisation (MFU): matrix products only, two operations for each multiplication, without
recomputation in the backward pass. Unlike there, attention is causal and within each sequence, and
the output head is applied to targets only, as in this trainer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from generation.engine.settings import head_widths
from sharding.send.source import whole_shape
from trainer.config.model_file import RECURRENT_LAYERS
from trainer.errors import UserError


def has_vision(config: PretrainedConfig) -> bool:
    """Return True if the model of this configuration takes images."""
    return getattr(config, "vision_config", None) is not None


def decoder(model: PreTrainedModel) -> Any:
    """Return the module that has the decoder layers: the trunk itself, or a multimodal model's
    language model.
    """
    return model.base_model.get_decoder() if has_vision(model.config) else model.base_model


def vision_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that only images pass, by name: the encoder and its projection; {} for
    text models.
    """
    if not has_vision(model.config):
        return {}
    modules = {module for module in model.base_model.children() if module is not decoder(model)}
    return {name: module for name, module in model.named_modules() if module in modules}


def encoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the vision encoder."""
    modules = (module for part in vision_modules(model).values() for module in part.modules())
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def adds_to_products(names: Iterable[str]) -> bool:
    """Return True if experts have biases among these parameters, which Transformers adds to results
    of products in place (`transformers/integrations/moe.py`).
    """
    return any(name.endswith("_proj_bias") for name in names)


def image_token(model: PreTrainedModel, patches: float) -> float:
    """Return `ModelFlops.image_token` of a multimodal model that makes a token of so many patches
    of an image.

    Activations are assumed to grow with layers and hidden size, here and in the decoder. Example:
    in Qwen2.5-VL's 7B model four patches are one token, and 32 blocks of 1280 for them are 1.6
    times 28 layers of 3584 for a token.
    """
    size = len(decoder(model).layers) * model.config.get_text_config().hidden_size
    # 0: there is an embedding instead of an encoder
    width = getattr(model.config.vision_config, "hidden_size", 0)
    return float(patches * len(encoder_layers(model)) * width / size)


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Return the names of the weights [rows, columns] of linear layers, and of adapters, below the
    model's heads.

    Embeddings, routers, heads, and experts in one tensor [experts, rows, columns] are not among
    them.
    """
    layers = {module for module in model.base_model.modules() if isinstance(module, nn.Linear | Conv1D)}
    return {f"{name}.weight" for name, module in model.named_modules() if module in layers}


def recurrent_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the decoder layers that hand a state from token to token.

    They are those with a causal convolution of their own, as all of them have in Transformers 5.
    """
    mixers = []
    for layer in getattr(decoder(model), "layers", ()):
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                mixers.append(module)
    return mixers


class PassSize(NamedTuple):
    """The size of a pass, from which `ModelFlops` counts its operations."""

    tokens: float  # tokens of the model's input
    targets: float
    pairs: float  # query-key pairs (`attended`)
    patches: float = 0  # image patches
    # Tokens that recurrent mixers compute besides those of the input: a common beginning again for
    # each path that has it (`trainer.policy.recurrent`)
    repeated: float = 0


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model's matrices, from which the operations of its passes follow."""

    # Elements of the matrices that each token is multiplied by, including only the experts that it
    # is sent to
    trunk: int
    trunk_learned: int  # the elements among them that are trained
    head: int  # elements of the output head, which is applied to each target
    head_learned: int  # as `head`, or 0 if the head is frozen
    # Attention layers * heads * head size, where head size is the mean of a key's and a value's
    attention: int
    # Elements of the matrices that an image patch is multiplied by; its attention is not counted
    vision: int = 0
    vision_learned: int = 0  # the elements among them that are trained
    # The encoder's activations for one token of an image, as a number of text tokens whose
    # activations are as large
    image_token: float = 0.0
    recurrent: int = 0  # elements of `trunk` in recurrent mixers
    recurrent_learned: int = 0  # the elements among them that are trained

    @property
    def recurrent_share(self) -> float:
        """The share of a token's operations in the trunk, attention aside, that recurrent mixers
        have.
        """
        return self.recurrent / max(1, self.trunk)

    def forward(
        self, tokens: float, targets: float, pairs: float, patches: float = 0, repeated: float = 0
    ) -> float:
        """Return the operations of a forward pass; the arguments are those of `PassSize`."""
        products = self.trunk * tokens + self.recurrent * repeated + self.head * targets
        return 2.0 * (products + self.vision * patches) + 4.0 * self.attention * pairs

    def backward(
        self, tokens: float, targets: float, pairs: float, patches: float = 0, repeated: float = 0
    ) -> float:
        """Return the operations of the backward pass: gradients of all inputs and of the trained
        matrices.
        """
        learned = self.trunk_learned * tokens + self.recurrent_learned * repeated
        learned += self.head_learned * targets + self.vision_learned * patches
        # A frozen encoder needs no gradients
        seen = patches if self.vision_learned else 0
        inputs = self.forward(tokens, targets, 2 * pairs, seen, repeated)
        return 2.0 * learned + inputs

    def tokens_worth(self, length: int) -> int:
        """Return a sequence's operations in the trunk, attention included, in units of a token's
        without attention.

        Example: in Qwen2.5's 7B model a sequence of 64k tokens is worth about 128k, and two of 32k
        together 96k.
        """
        # 4 * attention * pairs / (2 * trunk)
        return length + self.attention * length * (length + 1) // self.trunk


def attended(lengths: Sequence[float]) -> float:
    """Return the number of query-key pairs of causal attention in sequences of these lengths;
    windows are ignored.
    """
    return sum(length * (length + 1) / 2 for length in lengths)


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Return the sizes of a Transformers model, which may be on the meta device or under ZeRO, but
    not sharded yet.
    """
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    ends = {id(embedding.weight)}
    if head is not None:
        ends.add(id(head.weight))
    of_images: list[torch.Tensor] = []
    for part in vision_modules(model).values():
        of_images += [weight for weight in part.parameters() if len(whole_shape(weight)) > 1]
    outside = ends | set(map(id, of_images))
    mixers = [weight for mixer in recurrent_mixers(model) for weight in mixer.parameters()]
    recurrent = set(map(id, mixers))
    trunk = learned = repeated = repeated_learned = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in outside and len(shape := whole_shape(parameter)) > 1:
            # A token is sent to some of them
            experts = shape[0] if ".experts." in name and len(shape) > 2 else 0
            share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
            used = int(shape.numel() * share)
            trunk = trunk + used
            learned = learned + used * parameter.requires_grad
            if id(parameter) in recurrent:
                repeated = repeated + used
                repeated_learned = repeated_learned + used * parameter.requires_grad
    size = 0 if head is None else whole_shape(head.weight).numel()
    # Some model families call these two differently in config.json.
    sizes = config.to_dict() | {
        name: getattr(config, name) for name in ("hidden_size", "num_attention_heads")
    }
    kinds = getattr(config, "layer_types", None) or ()
    attending = config.num_hidden_layers - sum(kind in RECURRENT_LAYERS for kind in kinds)
    return ModelFlops(
        trunk=trunk,
        trunk_learned=learned,
        head=size,
        head_learned=size if size and head.weight.requires_grad else 0,
        attention=attending * config.num_attention_heads * sum(head_widths(sizes)) // 2,
        vision=sum(whole_shape(p).numel() for p in of_images),
        vision_learned=sum(whole_shape(p).numel() for p in of_images if p.requires_grad),
        recurrent=repeated,
        recurrent_learned=repeated_learned,
    )


@dataclass
class Work:
    """A counter of the work that a model has done on this rank so far."""

    of: ModelFlops
    tokens: int = field(default=0, init=False)  # tokens of training passes, prompts included
    flops: float = field(default=0.0, init=False)  # operations of training and of scoring passes

    def count(self, size: PassSize, logical: int) -> None:
        """Count a forward pass, and a backward pass if gradients are on.

        `logical` is the number of the sequences' tokens, of which some may be computed once for
        several sequences.
        """
        self.flops += self.of.forward(*size)
        if torch.is_grad_enabled():
            self.flops += self.of.backward(*size)
            self.tokens += logical


def freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    """Freeze the parameters that policy.freeze names: `vision`, or patterns of names of modules or
    parameters.

    Raises UserError if a pattern fits nothing, or if no parameter is left to train.
    """
    of_images = {
        parameter for module in vision_modules(model).values() for parameter in module.parameters()
    }
    for pattern in patterns:
        named = {
            p
            for name, p in model.named_parameters()
            if fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*")
        }
        frozen = of_images if pattern == "vision" else named
        if not frozen:
            raise UserError(
                f"policy.freeze: {type(model).__name__} has nothing that {pattern} fits: leave it out"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"policy.freeze leaves {type(model).__name__} nothing to learn: name fewer parameters"
        )
