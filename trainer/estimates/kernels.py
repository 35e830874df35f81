"""Kernels and memory traffic of a model's layers, counted by running them on tensors without data.

Nothing is assumed about a family: its own code runs, forward and backward, on the meta device, and
every operation that would be a kernel on a GPU is noted with the bytes of its inputs and outputs.
Attention counts as one kernel, as the trainer computes it. Caches, and operations that PyTorch
fuses on a GPU alone, make the true traffic smaller.

What `policy.compile` fuses is counted by its inputs and outputs: a kernel for each shape of its
results, which reads in backward what eager autograd would keep of the inputs. A weight's gradient
is a sum over tokens, so it takes two more kernels and reads its operands once more. What Inductor
generates may be less, as it may join the two.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, PreTrainedModel

from trainer.config.model_file import EXPERT_KEYS, model_config
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.model_structure import decoder
from trainer.policy.fused import Pointwise, fuse
from trainer.policy.hf_format import build_meta_model
from trainer.policy.lora import add_adapters

_COUNTED_ATTENTION = "hotbunk_counted"

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")

_NOT_KERNELS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
)
"""Operations that launch nothing, besides views."""

_INDEXED_READS = ("gather", "index", "index_select", "embedding")
"""Operations that read only as many elements of their input as they write."""

_INDEXED_SUMS = ("scatter_add_", "index_add_", "index_put_", "_index_put_impl_")
"""Operations that read and write only as many elements of their input as are added to it."""

WIDE = 125
"""Operations per byte from which a product is as fast as its operations allow; a narrower one, such
as that of an adapter's factor, counts by its bytes as well. It is the ratio of the sustained rates
of an A100, 212e12 and 1.7e12; an H100 has 236.
"""


@dataclass(frozen=True)
class PassCount:
    """The kernels of one pass through all decoder layers, and the bytes that they move.

    Attributes:
        kernels: number of kernels, however many tokens there are.
        products: number of those that are matrix products.
        token_operations: floating-point operations of these per token.
        token_bytes: bytes read and written per token, without those of wide products.
    """

    kernels: float = 0.0
    token_bytes: float = 0.0
    products: float = 0.0
    token_operations: float = 0.0

    def __add__(self, other: "PassCount") -> "PassCount":
        return PassCount(
            self.kernels + other.kernels,
            self.token_bytes + other.token_bytes,
            self.products + other.products,
            self.token_operations + other.token_operations,
        )

    def times(self, factor: float) -> "PassCount":
        """Return the count of `factor` such passes."""
        return PassCount(
            factor * self.kernels,
            factor * self.token_bytes,
            factor * self.products,
            factor * self.token_operations,
        )


@dataclass(frozen=True)
class KernelCounts:
    """The counts of a forward pass, and of the backward pass without recomputation."""

    forward: PassCount = PassCount()
    backward: PassCount = PassCount()


def count_kernels(config: TrainConfig, path: str, rows: int, length: int) -> KernelCounts:
    """Count the kernels of the decoder layers of the model at `path` for `rows` sequences of
    `length` tokens.

    Layers of one kind, with equal classes and shapes, are counted once. A mixture is counted in
    bfloat16, since torch knows the shape of a grouped product in that dtype alone. Raises UserError
    if the model's code does not run on tensors without data.
    """
    meta = torch.device("meta")
    is_mixture = any(model_config(path).get(key) for key in EXPERT_KEYS)
    dtype = torch.bfloat16 if is_mixture else getattr(torch, config.policy.dtype)
    model = build_meta_model(Path(path), config.model, dtype, meta)
    if config.lora.rank:
        add_adapters(model, config.lora, dtype, "meta")
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = _COUNTED_ATTENTION
    if config.policy.backend == "fsdp" and config.policy.compile is not False:
        fuse(model, as_one_kernel)
    layers = decoder(model).layers
    repeated: dict[int, int] = {}  # how often a kind occurs, by the index of its first layer
    first_of: dict[Any, int] = {}
    for index, layer in enumerate(layers):
        first = first_of.setdefault(_kind(model, layer, index), index)
        repeated[first] = repeated.get(first, 0) + 1
    forward = PassCount()
    backward = PassCount()
    for index, count in repeated.items():
        # The difference between a trunk that ends with this layer and one that ends before it is
        # the layer's own.
        with_layer = _trunk_counts(model, layers[: index + 1], rows, length)
        without = _trunk_counts(model, layers[:index], rows, length)
        forward += (with_layer.forward + without.forward.times(-1)).times(count)
        backward += (with_layer.backward + without.backward.times(-1)).times(count)
    return KernelCounts(forward, backward)


def _kind(model: PreTrainedModel, layer: nn.Module, index: int) -> Any:
    """Return a value that is equal for layers that launch the same kernels."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    layer_type = types[index] if index < len(types) else None
    shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
    return type(layer), layer_type, shapes


def _trunk_counts(model: PreTrainedModel, layers: nn.ModuleList, rows: int, length: int) -> KernelCounts:
    """Count the two passes of the trunk with these `layers` alone."""
    trunk = decoder(model)
    every_layer = trunk.layers
    hidden_size = model.config.get_text_config().hidden_size
    hidden = torch.empty(rows, length, hidden_size, dtype=model.dtype, device="meta", requires_grad=True)
    positions = torch.arange(length, device="meta").expand(rows, length)
    trunk.layers = layers
    try:
        with KernelCounter() as forward:
            result = trunk(
                inputs_embeds=hidden, position_ids=positions, use_cache=False
            ).last_hidden_state
        with KernelCounter() as backward:
            torch.autograd.backward([result], [torch.empty_like(result)])
    except Exception as error:  # the model's own code may raise anything
        reason = f"{type(model).__name__} does not run on tensors without data ({type(error).__name__})"
        raise UserError(f"its kernels cannot be counted, since {reason}: plan without --gpu") from error
    finally:
        trunk.layers = every_layer
        model.zero_grad()
    tokens = rows * length
    return KernelCounts(forward.per_token(tokens), backward.per_token(tokens))


class KernelCounter(TorchDispatchMode):
    """Counts the operations that are kernels on a GPU, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0
        self.products = 0
        self.operations = 0

    def per_token(self, tokens: int) -> PassCount:
        """Return the counts of a pass of so many tokens."""
        return PassCount(self.kernels, self.bytes / tokens, self.products, self.operations / tokens)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _NOT_KERNELS:
            return result
        self.kernels += 1
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in _INDEXED_READS:
            self.bytes += 2 * _bytes(outputs) + _bytes(inputs[1:])
        elif name in _INDEXED_SUMS:
            self.bytes += 3 * _bytes(inputs[-1:]) + _bytes(inputs[1:-1])
        else:
            moved = _bytes(inputs) + _bytes(outputs)
            operations = _operations(name, inputs, outputs)
            self.operations += operations
            self.products += operations > 0
            if not operations or operations < WIDE * moved:
                self.bytes += moved
        return result


def as_one_kernel(body: Pointwise) -> Pointwise:
    """Return the body as what counts as one kernel, forward and backward."""

    def call(*args: Any, **options: Any) -> Any:
        weights = [weight for arg in args if isinstance(arg, nn.Module) for weight in arg.parameters()]
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        return _OneKernel.apply(partial(body, *args, **options), len(tensors), *tensors, *weights)

    return call


class _OneKernel(torch.autograd.Function):
    """A fused body on tensors without data, whose gradients are no more than shapes."""

    @staticmethod
    def forward(ctx: Any, body: Pointwise, tensors: int, *operands: Tensor) -> Any:
        kept: list[Tensor] = []
        pack = saved_tensors_hooks(kept.append, lambda packed: packed)
        with _disable_current_modes(), torch.enable_grad(), pack:
            result = body()
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in kept}
        reads = [x for x in operands if x.untyped_storage()._cdata in storages]
        ctx.reads = operands if len(storages) > len(reads) else reads
        ctx.operands = operands
        ctx.tensors = tensors
        _count(len({tensor.shape for tensor in results}) or 1, [*operands, *results])
        return tree_map_only(Tensor, Tensor.detach, result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        found = [
            torch.empty_like(x) if need else None for x, need in zip(ctx.operands, needed, strict=True)
        ]
        of_tensors = [x for x in found[: ctx.tensors] if x is not None]
        _count(len({tensor.shape for tensor in of_tensors}), [*gradients, *ctx.reads, *of_tensors])
        for weight in found[ctx.tensors :]:
            if weight is not None:
                _count(2, [*gradients, *ctx.reads, weight])
        return None, None, *found


def _count(kernels: int, moved: list[Tensor]) -> None:
    """Count fused kernels that read and write the tensors `moved`."""
    counter = _get_current_dispatch_mode()
    if isinstance(counter, KernelCounter):
        counter.kernels += kernels
        counter.bytes += _bytes(moved)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _operations(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the operations of a product, whose left factor's last size is summed over; 0 for
    others.
    """
    if name not in _PRODUCTS:
        return 0
    left = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
    # The experts' weights' gradients: each sums over its own tokens
    groups = len(outputs[0]) if left.ndim < outputs[0].ndim else 1
    return 2 * left.shape[-1] * outputs[0].numel() // groups


@torch.library.custom_op("hotbunk::counted_attention", mutates_args=())
def _attention_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stand for a kernel that reads [B, heads, T, D] and writes [B, T, heads, D]."""
    raise NotImplementedError("it only runs on tensors without data")


@_attention_kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


@torch.library.custom_op("hotbunk::counted_attention_backward", mutates_args=())
def _attention_backward_kernel(
    grad: Tensor, result: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Stand for a kernel that writes the gradients of queries, keys and values."""
    raise NotImplementedError("it only runs on tensors without data")


@_attention_backward_kernel.register_fake
def _(
    grad: Tensor, result: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _attention_backward_kernel(grad, *ctx.saved_tensors)


_attention_kernel.register_autograd(_backward, setup_context=_save_for_backward)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> Any:
    """Count attention under Transformers' interface."""
    return _attention_kernel(query, key, value), None


AttentionInterface.register(_COUNTED_ATTENTION, _attention)
