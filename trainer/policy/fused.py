"""Pointwise parts of a model as one compiled kernel each: norms, rotary embeddings, and the
product of activation and gate in MLPs and experts; on a GPU, what the output head makes of a block
of logits (`trainer.policy.logprobs`).

`torch.compile` compiles these bodies alone, for any number of tokens, and the products between them
stay eager: recomputation, adapters, FSDP2 and common beginnings see the same modules as before.
Transformers' kernel integration downloads kernels by name from a hub, and Liger's functions are
written for a dozen families, whereas the families' own code is what is compiled here, so nothing is
to be kept equal to it. A part that is not known runs as before.
"""

import inspect
import re
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils._triton import has_triton
from transformers import PreTrainedModel
from transformers.integrations import moe

from trainer.config.schema import PolicyConfig
from trainer.errors import UserError
from trainer.model_structure import decoder
from trainer.policy.shortcuts import Shortcut, in_use

_VARIANTS = 64
"""Variants of one body: with and without gradients, frozen and trained weights, widths, dtypes."""

_ROTARY = "apply_rotary_pos_emb"

_GATED_MLP = re.compile(
    r"def forward\(self, (?P<x>\w+)[^)]*\)[^:]*:\s+(return|(?P<y>\w+) =) "
    r"self\.down_proj\(self\.act_fn\(self\.gate_proj\((?P=x)\)\) \* self\.up_proj\((?P=x)\)\)"
    r"(\s+return (?P=y))?\s*"
)
"""The whole forward of a gated MLP; its form is the same in some 130 classes of Transformers."""

Pointwise = Callable[..., Any]
"""A pointwise function of modules and of tensors [..., width]."""


def is_fused(policy: PolicyConfig, device_type: str) -> bool:
    """Return True if the policy's models have fused kernels on "cpu" or "cuda".

    By default they do where Triton is installed and finds a GPU.
    """
    if policy.compile is None:
        return policy.backend == "fsdp" and device_type == "cuda" and bool(has_triton())
    return policy.compile


class Fused:
    """A pointwise body that runs compiled unless the process leaves the shortcut out.

    The last dimension of its tensors is the model's, and the others are the batch's.
    """

    def __init__(self, body: Pointwise, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile `body` when it is called; other models that have it share what was compiled."""
        self.body = body
        # With the forward kernel, so that what the compiler lacks is found in a first pass
        torch._functorch.config.force_non_lazy_backward_lowering = True
        self.compiled = torch.compile(  # type: ignore[call-overload]
            body, dynamic=True, backend=backend, recompile_limit=_VARIANTS
        )

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return what the body returns."""
        if not in_use(Shortcut.FUSED):
            return self.body(*args, **options)
        for tensor in args:
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static(tensor, tensor.ndim - 1)
        try:
            return self.compiled(*args, **options)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = str(cause).partition("\n")[0] or type(cause).__name__
            raise UserError(
                f"policy.compile: {self.body.__qualname__} cannot be compiled on this machine "
                f"({reason}): set it to false"
            ) from error


def fuse(model: PreTrainedModel, make: Callable[[Pointwise], Pointwise] = Fused) -> list[str]:
    """Fuse the pointwise parts of the model's decoder, and return the names of those that none of
    its modules has in a known form. Plans `make` something that counts kernels.
    """
    fused = dict.fromkeys(("norms", "rotary embeddings", "gates of MLPs"), 0)
    one = lru_cache(maxsize=None)(make)  # for all layers
    for module in decoder(model).modules():
        if "forward" in vars(module):  # replaced by somebody else
            continue
        kind = type(module)
        if "Norm" in kind.__name__ and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.forward = partial(one(kind.forward), module)
            fused["norms"] += 1
        elif rotary := _rotary_function(kind):
            body = _with_global(kind.forward, _ROTARY, one(rotary))
            module.forward = MethodType(body, module)
            fused["rotary embeddings"] += 1
        elif _is_gated_mlp(kind):
            module.forward = partial(_gated_mlp, module, one(_gated))
            fused["gates of MLPs"] += 1
        elif getattr(kind, "_apply_gate", None) is getattr(moe, "_default_apply_gate", moe):
            module._apply_gate = partial(one(_gated_halves), module.act_fn)
            fused["gates of MLPs"] += 1
    if (head := model.get_output_embeddings()) is not None:
        head.fused = one  # for `target_logprobs` on a GPU
    return [name for name, count in fused.items() if not count]


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _gated_halves(activation: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


def _gated_mlp(mlp: Any, product: Pointwise, hidden: Tensor) -> Any:
    return mlp.down_proj(product(mlp.act_fn, mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def _is_gated_mlp(kind: type[nn.Module]) -> bool:
    """Return True if the class's forward is the common line of gated MLPs and nothing else."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):  # without source
        return False
    return _GATED_MLP.fullmatch(source.strip()) is not None


def _rotary_function(kind: type[nn.Module]) -> Pointwise | None:
    """Return the function by which the class's forward applies rotary embeddings; None if it has no
    such call.
    """
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    return forward.__globals__.get(_ROTARY)


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return a copy of the function that has another value of one global, for this model alone."""
    scope = function.__globals__ | {name: value}
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
