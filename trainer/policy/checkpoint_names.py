"""Under which names and in which pieces a parameter in memory appears in a checkpoint.

Transformers 5 keeps some weights fused in memory, a mixture's experts above all, while checkpoints (and vLLM, which
reads them) have one tensor for each expert. Loading, saving and the weight sync all need the same answer: which stretch
of the parameter's elements is which checkpoint tensor.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class CheckpointView(NamedTuple):
    """A checkpoint tensor as a contiguous stretch of a parameter: elements [offset, offset + prod(shape))."""

    name: str
    offset: int
    shape: tuple[int, ...]


def checkpoint_views(model: PreTrainedModel, name: str, shape: Iterable[int]) -> list[CheckpointView]:
    """The checkpoint tensors that the parameter `name` of `shape` consists of, in the order of their elements.

    Found by sending a tensor without data through Transformers' own conversion to checkpoint format and looking at
    which part of it each result is a view of.

    Raises:
        ValueError: when a checkpoint tensor is not a contiguous part of the parameter (a transposed weight, for
            instance), or the parts do not make up the whole.
    """
    shape = tuple(shape)
    name = name.replace(".base_layer.", ".")  # PEFT keeps the own weights of a layer with an adapter one level down
    probe = torch.empty(shape, device="meta").as_subclass(_ViewProbe)
    storage = probe.untyped_storage()._cdata
    views = []
    for checkpoint_name, piece in revert_weight_conversion(model, {name: probe}).items():
        if piece.untyped_storage()._cdata != storage or not piece.is_contiguous():
            raise ValueError(f"{checkpoint_name} in the checkpoint is not a contiguous part of {name} in memory")
        views.append(CheckpointView(checkpoint_name, int(piece.storage_offset()), tuple(piece.shape)))
    views.sort(key=lambda view: view.offset)
    expected = 0
    for view in views:
        if view.offset != expected:
            raise ValueError(
                f"{view.name} in the checkpoint begins at element {view.offset} of {name}, not at {expected}"
            )
        expected += math.prod(view.shape)
    if expected != math.prod(shape):
        raise ValueError(f"the checkpoint's tensors cover {expected} elements of {name}, which has {math.prod(shape)}")
    return views


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name in memory, each once: of tied ones only the first, which checkpoints hold."""
    return dict(model.named_parameters(remove_duplicate=True))


class _ViewProbe(Tensor):
    """A tensor whose `contiguous()` is itself: conversions call it on chunks, and a copy would hide its origin."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})
