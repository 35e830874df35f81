"""Sizes of a model from its config.json, from which memory and time are estimated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.config.schema import LoraConfig, PolicyConfig, TrainConfig
from trainer.estimates.kernels import KernelCounts
from trainer.model_structure import (
    ModelFlops,
    decoder,
    encoder_layers,
    hidden_matrices,
    image_token,
    model_flops,
)
from trainer.policy.experts import dispatched_experts
from trainer.policy.hf_format import build_meta_model, make_vision, parameter_names
from trainer.policy.lora import NO_ADAPTERS, add_adapters, factors
from trainer.policy.optimizer_choice import state_widths

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model's parameters, in elements."""

    config: dict[str, Any]  # config.json with the model's defaults filled in
    shapes: Shapes  # the shape of each parameter, tied ones once
    layer: int  # elements of the largest decoder layer
    rest: int  # elements of all parameters outside of layers
    # The shapes of each unit that FSDP2 gathers: layers, embeddings and head if they are separate,
    # the rest
    units: Mapping[str, list[torch.Size]] = field(default_factory=dict)
    # The shapes of those of a layer's parameters that `policy.expert_parallel` splits, by the
    # layer's unit
    experts: Mapping[str, list[torch.Size]] = field(default_factory=dict)
    head: int = 0  # elements of the output head, which is in `rest`; 0 if there is none
    tied: bool = False  # True if head and embeddings are one parameter
    normed: int = 0  # elements per token that a layer's norms compute
    # Operations per token
    flops: ModelFlops = ModelFlops(0, 0, 0, 0, 0)  # noqa: RUF009 - it is immutable
    # Shapes of the adapters' factors; without adapters the weights themselves are trained
    adapters: Shapes = field(default_factory=dict)
    # Names of the trained parameters that are matrices of hidden layers
    matrices: frozenset[str] = frozenset()
    # Kernels of the decoder layers, counted (`trainer.estimates.kernels`) where seconds are
    # estimated
    kernels: KernelCounts = KernelCounts()  # noqa: RUF009 - it is immutable

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self.config["num_hidden_layers"]

    @property
    def trained(self) -> Shapes:
        """The shapes of trained parameters: the adapters', or all."""
        return self.adapters or self.shapes

    @property
    def split(self) -> int:
        """Elements of the experts that can be split in the layer that has the most."""
        most = 0
        for shapes in self.experts.values():
            most = max(most, sum(shape.numel() for shape in shapes))
        return most

    @property
    def width(self) -> int:
        """The width of the MLP that a token passes; in a mixture, the sum over the token's
        experts.
        """
        chosen = self.config.get("num_experts_per_tok")
        dense: int = self.config.get("intermediate_size") or 0
        return int(chosen * (self.config.get("moe_intermediate_size") or dense)) if chosen else dense

    @property
    def dispatched(self) -> int:
        """Elements of the copies of a token that its experts get; 0 without a mixture."""
        return int((self.config.get("num_experts_per_tok") or 0) * self.config["hidden_size"])


def model_sizes(
    config: TrainConfig, path: str, lora: LoraConfig = NO_ADAPTERS, kind: Any = None, **settings: int
) -> ModelSizes:
    """Return the sizes of the model whose config.json is at `path`, built without data; arguments
    as in `build_meta_model`.
    """
    model = build_meta_model(
        Path(path), config.model, torch.float32, torch.device("cpu"), kind, **settings
    )
    shapes = {name: parameter.shape for name, parameter in parameter_names(model).items()}
    layers = []
    for layer in decoder(model).layers:
        layers.append(sum(parameter.numel() for parameter in layer.parameters()))
    encoder = 0
    for layer in encoder_layers(model):
        encoder += sum(parameter.numel() for parameter in layer.parameters())
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    units = _units(model)
    experts = _experts(model)
    normed = _normed(model)
    if lora.rank:  # last, since adapters rename the weights beside them
        add_adapters(model, lora, torch.float32, "meta")
    return ModelSizes(
        config=model.config.get_text_config().to_dict(),
        shapes=shapes,
        layer=max(layers),
        rest=sum(shape.numel() for shape in shapes.values()) - sum(layers) - encoder,
        units=units,
        experts=experts,
        head=0 if head is None else head.weight.numel(),
        tied=head is not None and head.weight is embedding.weight,
        normed=normed,
        flops=replace(
            model_flops(model), image_token=_image_token(model, path) if config.data.max_images else 0.0
        ),
        adapters={name: factor.shape for name, factor in factors(model).items()},
        matrices=frozenset(hidden_matrices(model)),
    )


def _image_token(model: PreTrainedModel, path: str) -> float:
    """Return `ModelFlops.image_token`, by config.json if it says how many patches become a token,
    else by the processor.
    """
    vision = getattr(model.config, "vision_config", None)
    if merged := getattr(vision, "spatial_merge_size", None):
        return image_token(model, merged**2)
    preparer = make_vision(model, Path(path))
    return 0.0 if preparer is None else preparer.image_token(model)


def _units(model: PreTrainedModel) -> dict[str, list[torch.Size]]:
    """Return the shapes of FSDP2's units by name, as `trainer.policy.fsdp` makes them; names of
    layers have a dot.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    unit_of: dict[Any, str] = {}
    for i, layer in enumerate(decoder(model).layers):
        unit_of |= dict.fromkeys(layer.parameters(), f"layers.{i}")
    for i, layer in enumerate(encoder_layers(model)):
        unit_of |= dict.fromkeys(layer.parameters(), f"encoder.{i}")
    if head is None or head.weight is not embedding.weight:
        unit_of[embedding.weight] = "embeddings"
        unit_of |= {} if head is None else {head.weight: "head"}
    units: dict[str, list[torch.Size]] = {"root": []}
    for parameter in model.parameters():
        units.setdefault(unit_of.get(parameter, "root"), []).append(parameter.shape)
    return units


def _experts(model: PreTrainedModel) -> dict[str, list[torch.Size]]:
    """Return the shapes of the experts that can be split, by the unit of their layer."""
    dispatched = dispatched_experts(model)
    experts = {}
    for i, layer in enumerate(decoder(model).layers):
        modules = set(layer.modules())
        for module in dispatched:
            if module in modules:
                experts[f"layers.{i}"] = [parameter.shape for parameter in module.parameters()]
    return experts


def _normed(model: PreTrainedModel) -> int:
    """Return elements per token that the norms of the first layer compute; norms of queries and
    keys count for every head.
    """
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    heads = {"q_norm": queries, "k_norm": getattr(config, "num_key_value_heads", None) or queries}
    count = 0
    for name, parameter in decoder(model).layers[0].named_parameters():
        if "norm" in name and parameter.dim() == 1:
            of_heads = parameter.numel() < config.hidden_size
            times = [heads[key] for key in heads if of_heads and key in name]
            count += parameter.numel() * (times[0] if times else 1)
    return count


def shard(shapes: Shapes, ranks: int) -> int:
    """Return elements of the first rank's shards: rows are cut into equal chunks, and only the last
    chunks can be smaller.
    """
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes.values())


def optimizer_bytes(policy: PolicyConfig, model: ModelSizes, shards: int) -> int:
    """Return bytes of the optimizer's state on the rank that has the most."""
    widths = state_widths(policy, model.trained, model.matrices)
    return sum(widths[name] * shard({name: shape}, shards) for name, shape in model.trained.items())


def units_of(policy: PolicyConfig, model: ModelSizes, ranks: int) -> dict[str, tuple[int, int]]:
    """Return the units that FSDP2 gathers, by name: elements of the first rank's shard, and the
    number of ranks with shards.

    With `policy.expert_parallel` the experts of a layer are a unit of their own, which fewer ranks
    share.
    """
    shards = shards_of(policy, ranks)
    size = policy.expert_parallel
    units = {}
    for name, shapes in model.units.items():
        split = model.experts.get(name, []) if size > 1 else []
        rest = list(shapes)
        for shape in split:
            rest.remove(shape)
        units[name] = shard({str(i): shape for i, shape in enumerate(rest)}, shards), shards
        if split:
            units[f"{name}.experts"] = (
                shard({str(i): shape for i, shape in enumerate(split)}, shards),
                shards // size,
            )
    return units


def shards_of(policy: PolicyConfig, ranks: int) -> int:
    """Return the number of ranks that a model is sharded over."""
    return min(policy.shard_size or ranks, ranks)


def compute_width(policy: PolicyConfig) -> int:
    """Return bytes of an element in the compute dtype."""
    return getattr(torch, policy.dtype).itemsize


def longest(config: TrainConfig) -> int:
    """Return the most tokens of a prompt with its answer."""
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def answers_per_update(config: TrainConfig, ranks: int) -> int:
    """Return the answers of the largest update on the rank, or the ranks that share micro-batches,
    with the most.
    """
    prompts = math.ceil(config.batch.prompts_per_step / config.batch.updates_per_step)
    return math.ceil(
        prompts * config.algorithm.group_size / max(1, ranks // config.policy.sequence_parallel)
    )


def computed_prompts(config: TrainConfig, answers: float, prompt: float) -> float:
    """Return the prompts of this many tokens that updates on answers compute: one for each answer,
    or for each group.
    """
    least = config.batch.shared_min
    return answers if least is None or prompt < least else answers / config.algorithm.group_size
