"""Causal attention for sequences laid end to end, each seeing itself only.

Transformers has two ways to pack: an [N, N] block mask made from position ids, whose memory grows with the square of
the pack and which rules out the fast kernels; and flash-attn, which needs its own installation and a GPU. This function
takes flash-attn's cumulative lengths and runs everywhere: with PyTorch's variable-length kernel on CUDA in half
precision, with one causal call for each run of equally long sequences elsewhere.
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

from trainer.config.model_file import PACKABLE_LAYERS
from trainer.errors import UserError
from trainer.model_structure import sees
from trainer.policy.sequence import heads_for_tokens, tokens_for_heads

NAME = "hotbunk_sdpa"
"""The value of `attn_implementation` under which Transformers finds `attention`."""

_WITHOUT_EFFECT = frozenset(
    ("position_ids", "cu_seq_lens_k", "max_length_k", "is_causal", "use_cache", "output_attentions", "cache_position")
)
"""Arguments that models also pass to their attention, and that add nothing to the others."""

# Grouped queries have to be asked for since torch 2.12 (torch/nn/attention/varlen.py); before, the kernel took them.
# With more than one split a sequence's result would depend on the longest of its batch (ibid., num_splits).
_PARAMETERS = inspect.signature(varlen_attn).parameters
_OPTIONS: Any = {name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in _PARAMETERS}


@torch.compiler.disable  # lengths differ from pack to pack: a compiled loop over them would be compiled anew for each
def attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]; key and value may have fewer heads, which divide the query's
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,  # how many positions a query sees, counted backwards, itself included
    cu_seq_lens_q: Tensor | None = None,  # [S+1] int32, the index in T at which each sequence begins, and T; B is 1
    max_length_q: int = 0,  # the length of the longest of those sequences
    sequence_lengths: Sequence[int] = (),  # all of their lengths, so that the device need not be asked
    token_parts: Sequence[int] = (),  # tokens on each rank that shares them, of which T are here; (): they are all here
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; masks are made here, where they are needed.

    Without `cu_seq_lens_q` there are B sequences of T. Gives [B, T, heads, D], and no attention weights. Raises
    UserError where the model uses another argument, such as a soft cap of the scores, or sinks.
    """
    if unknown := [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]:
        asked = f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which packing does not know"
        raise UserError(f"{asked}: set model.attn_implementation to eager and batch.packing to false")
    if token_parts:
        query, key, value = heads_for_tokens(token_parts, query, key, value)
        own = partial(attention, module, query, key, value, attention_mask, dropout, scaling, sliding_window)
        return tokens_for_heads(token_parts, own(cu_seq_lens_q, max_length_q, sequence_lengths)[0]), None
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
    """Sequences of one length, [B, heads, T, D] like the query."""
    length, grouped, band = query.shape[2], query.shape[1] != key.shape[1], None
    if window is not None and length > window:
        band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=grouped
    )


def _kernel_takes(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether PyTorch's build of FlashAttention computes this."""
    size = query.shape[-1]
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False  # FlashAttention begins with Ampere
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0.0 and size == value.shape[-1] and size <= 256 and size % 8 == 0


AttentionInterface.register(NAME, attention)


def implementation(asked: str, model: type[PreTrainedModel], config: Any) -> str:
    """`NAME` in place of PyTorch's plain attention wherever the model allows it and the result is the same."""
    return NAME if asked == "sdpa" and model._supports_sdpa and packing_obstacle(model, config) is None else asked


def packing_obstacle(model: type[PreTrainedModel], config: Any) -> str | None:
    """Why sequences of this model cannot be laid end to end, or None where they can."""
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - set(PACKABLE_LAYERS))
    if others or model._is_stateful:
        return f"has layers ({', '.join(others) or 'recurrent'}) that would carry over from one sequence to the next"
    if sees(config) and "token_type_ids" in inspect.signature(model.forward).parameters:
        return "lets the tokens of an image see those that come after them"
    if not model._supports_attention_backend:
        return "brings its own attention, which takes no ends of sequences"
    return None


def require_sharing(model: PreTrainedModel) -> None:
    """Raise UserError where ranks cannot share a sequence: tokens would meet elsewhere than in `attention`."""
    obstacle = packing_obstacle(type(model), model.config)
    if obstacle is None and model.config._attn_implementation != NAME:
        obstacle = "computes its attention in its own way"
    if obstacle is not None:
        key = "policy.sequence_parallel is above 1"
        raise UserError(f"{key}, but {type(model).__name__} {obstacle}: set it to 1")


def require_packing(model: PreTrainedModel) -> None:
    """Raise UserError where a pack would mix sequences."""
    if obstacle := packing_obstacle(type(model), model.config):
        raise UserError(f"batch.packing is true, but {type(model).__name__} {obstacle}: set it to false")
