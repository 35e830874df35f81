"""Tied embeddings that add the gradients of a batch's tokens to the output head's gradient."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel


def add_rows_to_head(model: PreTrainedModel) -> None:
    """Make tied embeddings [V, H] add the rows of a batch's tokens to the weight's gradient, which
    the head has begun.

    Otherwise, backward would make a second gradient [V, H], mostly zeros, while the weight and the
    gradient of earlier micro-batches are in memory as well. Only for weights in float32 on a CPU:
    in bfloat16 a frequent token's terms would be lost one by one beside the head's, and on CUDA
    their order would vary. Does nothing to untied embeddings.
    """
    embedding = model.get_input_embeddings()
    if (
        model.get_output_embeddings().weight is not embedding.weight
        or type(embedding) is not nn.Embedding
    ):
        return
    lookup = embedding.forward
    start = torch.zeros((), requires_grad=True)  # so that backward comes by, although not for the weight

    def forward(ids: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and embedding.weight.requires_grad):
            return lookup(ids)
        rows: Tensor = _Rows.apply(start, embedding, ids)
        return rows

    embedding.forward = forward  # type: ignore[assignment, method-assign]


class _Rows(torch.autograd.Function):
    """The rows of an embedding, whose backward adds to `weight.grad` itself instead of returning a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Return the rows of `ids`."""
        ctx.embedding = embedding
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, embedding.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Add token by token, in the order of `ids`; those with the index of padding get none, as
        in torch.
        """
        (ids,) = ctx.saved_tensors
        weight = ctx.embedding.weight
        padding = ctx.embedding.padding_idx
        if padding is not None:
            gradient = gradient.masked_fill((ids == padding).unsqueeze(-1), 0.0)
        if weight.grad is None:  # a loss that does not depend on the head
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
        return None, None, None
