"""Causal attention for sequences laid end to end, each of which attends only to itself.

Transformers has two ways to pack: an [N, N] block mask made from position ids, whose memory grows with the square of
the pack and which rules out the fast kernels; and flash-attn, which needs its own installation and a GPU. `attention`
takes flash-attn's cumulative lengths and runs everywhere: with PyTorch's variable-length kernel on CUDA in half
precision, elsewhere with one causal call for each run of equally long sequences.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from trainer.config.model_file import PACKABLE_LAYERS, SHARED_LAYERS
from trainer.errors import UserError
from trainer.model_structure import has_vision
from trainer.policy.recurrent import recurrent_mixers
from trainer.policy.sequence import heads_for_tokens, tokens_for_heads

NAME = "hotbunk_sdpa"
"""The value of `attn_implementation` under which Transformers finds `attention`."""

_WITHOUT_EFFECT = frozenset((
    "position_ids", "cu_seq_lens_k", "max_length_k", "is_causal", "use_cache", "output_attentions", "cache_position",
    "output_router_logits",
))  # fmt: skip
"""Arguments that models also pass to their attention, and that have no effect beside the others."""

# Since torch 2.12, grouped queries need an option (torch/nn/attention/varlen.py); before, the kernel just took them.
# With more than one split, a sequence's result would depend on the longest of its batch (ibid., num_splits).
_PARAMETERS = inspect.signature(varlen_attn).parameters
_OPTIONS: Any = {name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in _PARAMETERS}


@torch.compiler.disable  # lengths differ from pack to pack: a compiled loop over them would be recompiled for each
def attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]; key and value may have fewer heads, which divide the query's
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,  # number of positions that a query attends to, up to and including its own
    cu_seq_lens_q: Tensor | None = None,  # [S+1] int32, the index in T at which each sequence begins, and T; B is 1
    max_length_q: int = 0,  # the length of the longest of these sequences
    sequence_lengths: Sequence[int] = (),  # the lengths of all sequences, so that the host need not ask the device
    token_parts: Sequence[int] = (),  # number of tokens on each rank that shares them, T on this one; (): not shared
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention under Transformers' interface; it makes masks itself, if it needs them.

    Without `cu_seq_lens_q` there are B sequences of T. Returns [B, T, heads, D], and no attention weights. Raises
    UserError if the model uses another argument, such as a soft cap of the scores, or sinks.
    """
    if unknown := [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]:
        needs = f"{type(module).__name__} needs attention with {', '.join(unknown)}, which packing does not support"
        raise UserError(f"{needs}: set model.attn_implementation to eager and batch.packing to false")
    if token_parts:
        query, key, value = heads_for_tokens(token_parts, query, key, value)
        inner = partial(attention, module, query, key, value, attention_mask, dropout, scaling, sliding_window)
        return tokens_for_heads(token_parts, inner(cu_seq_lens_q, max_length_q, sequence_lengths)[0]), None
    causal = partial(_causal, dropout=dropout, scale=scaling, window=sliding_window)
    if cu_seq_lens_q is None:
        return causal(query, key, value).transpose(1, 2).contiguous(), None
    if _kernel_takes(query, value, dropout):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        starts, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(q, k, v, *starts, *longest, scale=scaling, window_size=window, **_OPTIONS)
        return cast(Tensor, out).unsqueeze(0), None
    parts, start = [], 0
    for length, run in groupby(sequence_lengths):
        count = len(list(run))
        stretch = slice(start, start := start + count * length)
        q, k, v = (x[0, :, stretch].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value))
        parts.append(causal(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention over sequences of one length; the result is [B, heads, T, D] like the query."""
    length, grouped, band = query.shape[2], query.shape[1] != key.shape[1], None
    if window is not None and length > window:
        band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=grouped
    )


def _kernel_takes(query: Tensor, value: Tensor, dropout: float) -> bool:
    """True if PyTorch's build of FlashAttention supports these tensors."""
    size = query.shape[-1]
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False  # FlashAttention needs Ampere or newer
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0.0 and size == value.shape[-1] and size <= 256 and size % 8 == 0


AttentionInterface.register(NAME, attention)


def implementation(asked: str, model: PreTrainedModel) -> str:
    """The attention implementation for `asked`: `NAME` instead of sdpa if the model allows it, with the same result."""
    return NAME if asked == "sdpa" and model._supports_sdpa and packing_obstacle(model) is None else asked


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """The reason why sequences of this model cannot be laid end to end; None if they can."""
    types = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := sorted(set(types) - set(PACKABLE_LAYERS)):
        return f"has layers ({', '.join(unknown)}) in which sequences of a pack would not be kept apart"
    mixers = len(recurrent_mixers(model))
    if mixers < sum(kind not in SHARED_LAYERS for kind in types) or (model._is_stateful and not mixers):
        return "has recurrent layers of an unknown kind, which would carry state over from one sequence to the next"
    if has_vision(model.config) and "token_type_ids" in inspect.signature(model.forward).parameters:
        return "lets the tokens of an image attend to later ones"
    # Hybrids do not declare the backend, although their attention layers look it up and pass all arguments on.
    if not model._supports_attention_backend and not mixers:
        return "has its own attention, which does not take the ends of sequences"
    return None


def require_sharing(model: PreTrainedModel) -> None:
    """Raises UserError if ranks cannot share a sequence, since tokens would interact outside of `attention`."""
    obstacle = packing_obstacle(model)
    if obstacle is None and recurrent_mixers(model):
        obstacle = "has recurrent layers, which need all tokens of a sequence"
    if obstacle is None and model.config._attn_implementation != NAME:
        obstacle = "computes its attention in its own way"
    if obstacle is not None:
        key = "policy.sequence_parallel is above 1"
        raise UserError(f"{key}, but {type(model).__name__} {obstacle}: set it to 1")


def require_packing(model: PreTrainedModel) -> None:
    """Raises UserError if a pack would mix sequences."""
    if obstacle := packing_obstacle(model):
        raise UserError(f"batch.packing is true, but {type(model).__name__} {obstacle}: set it to false")
