"""Causal attention for sequences laid end to end, each of which attends only to itself.

Transformers has two ways to pack: an [N, N] block mask made from position ids, whose memory grows
with the square of the pack and which rules out the fast kernels; and flash-attn, which needs its
own installation and a GPU. `attention` takes flash-attn's cumulative lengths and runs everywhere:
with PyTorch's variable-length kernel on CUDA in half precision, elsewhere with one causal call for
each run of equally long sequences.

It also takes what PyTorch's attention lacks. A sink is a score that a head adds to the softmax of
every query, without a value (gpt-oss). With the ordinary call's log-sum-exp, the result is out *
sigmoid(lse - sink), and the kernel's backward pass, given this result and logaddexp(lse, sink), is
exact. A soft cap c makes scores s c tanh(s / c) (Gemma 2). Where the kernel does not run, both are
computed in blocks of queries.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import attention as flash
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from sharding.ranks import rank
from trainer.config.model_file import PACKABLE_LAYERS, SHARED_LAYERS
from trainer.errors import UserError
from trainer.model_structure import has_vision, recurrent_mixers
from trainer.policy.paths import Paths
from trainer.policy.sequence import heads_for_tokens, tokens_for_heads
from trainer.policy.shortcuts import Shortcut, in_use
from trainer.types import PrefixTree

NAME = "hotbunk"
"""The value of `attn_implementation` under which Transformers finds `attention`.

A name with sdpa in it would be refused for models that do not support that, such as gpt-oss.
"""

_WITHOUT_EFFECT = frozenset(
    (
        "position_ids",
        "cu_seq_lens_k",
        "max_length_k",
        "is_causal",
        "use_cache",
        "output_attentions",
        "cache_position",
        "output_router_logits",
    )
)
"""Arguments that models also pass to their attention, and that have no effect beside the others."""

# Since torch 2.12, grouped queries need an option (torch/nn/attention/varlen.py); before, the
# kernel just took them. With more than one split, a sequence's result would depend on the longest
# of its batch (ibid., num_splits).
_PARAMETERS = inspect.signature(varlen_attn).parameters
_OPTIONS: Any = {
    name: value for name, value in {"enable_gqa": True, "num_splits": 1}.items() if name in _PARAMETERS
}

_SCORES = 1 << 24
"""Scores that exist at a time, of attention with sinks or a soft cap and without the kernel: 64 MiB
in float32.
"""


# Lengths differ from pack to pack: a compiled loop over them would be recompiled for each
@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]; key and value may have fewer heads, which divide the query's
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    # Number of positions that a query attends to, up to and including its own
    sliding_window: int | None = None,
    # [S+1] int32, the index in T at which each sequence begins, and T; B is 1
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,  # the length of the longest of these sequences
    # The lengths of all sequences, so that the host need not ask the device
    sequence_lengths: Sequence[int] = (),
    # The paths that the sequences, nodes of a trie, attend to; None: to themselves
    tree: PrefixTree | None = None,
    # Number of tokens on each rank that shares them, T on this one; (): not shared
    token_parts: Sequence[int] = (),
    s_aux: Tensor | None = None,  # [heads], the sinks
    softcap: float | None = None,  # the soft cap of the scores
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention under Transformers' interface; it makes masks itself, if it needs them.

    Without `cu_seq_lens_q` there are B sequences of T. Returns [B, T, heads, D], and no attention
    weights. Raises UserError if the model uses another argument, such as a bias of the scores.
    """
    given = [name for name, value in options.items() if value is not None]
    unknown = [name for name in given if name not in _WITHOUT_EFFECT]
    if unknown:
        needs = (
            f"{type(module).__name__} needs attention with {', '.join(unknown)}, which packing does not "
            "support"
        )
        raise UserError(f"{needs}: set model.attn_implementation to eager and batch.packing to false")
    if token_parts:
        ways = len(token_parts)
        sinks = None if s_aux is None else s_aux.chunk(ways)[rank() % ways]
        query, key, value = heads_for_tokens(token_parts, query, key, value)
        inner = partial(
            attention, module, query, key, value, attention_mask, dropout, scaling, sliding_window
        )
        out, _ = inner(cu_seq_lens_q, max_length_q, sequence_lengths, tree, s_aux=sinks, softcap=softcap)
        return tokens_for_heads(token_parts, out), None
    causal = partial(_causal, dropout=dropout, scale=scaling, window=sliding_window)
    if s_aux is not None or softcap is not None:
        causal = partial(
            _by_blocks, sinks=s_aux, cap=softcap, dropout=dropout, scale=scaling, window=sliding_window
        )
    if cu_seq_lens_q is None:
        return causal(query, key, value).transpose(1, 2).contiguous(), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    paths = sequence_lengths
    starts = (cu_seq_lens_q, cu_seq_lens_q)
    longest = (max_length_q, max_length_q)
    if tree is not None:
        paths = tree.lengths
        starts = (cu_seq_lens_q, tree.starts)
        longest = (max_length_q, max(tree.lengths))
        k = Paths.apply(k, tree.ranges)
        v = Paths.apply(v, tree.ranges)
    has_kernel = softcap is None and _kernel_takes(query, value, dropout)
    if has_kernel and (s_aux is None or in_use(Shortcut.SINKS)):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        if s_aux is not None:
            out = _KernelWithSinks.apply(q, k, v, s_aux, (starts, longest, scaling, window))
        else:
            out = varlen_attn(q, k, v, *starts, *longest, scale=scaling, window_size=window, **_OPTIONS)
        return cast(Tensor, out).unsqueeze(0), None
    return _by_lengths(q, k, v, sequence_lengths, paths, causal).unsqueeze(0), None


def _by_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    paths: Sequence[int],
    causal: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the attention [N, heads, D] of sequences laid end to end, with `lengths` queries and
    `paths` keys each. Neighbours with the same lengths are computed together by `causal`.
    """
    parts = []
    query_end = 0
    key_end = 0
    for (length, path), run in groupby(zip(lengths, paths, strict=True)):
        count = len(list(run))
        query_begin = query_end
        query_end += count * length
        key_begin = key_end
        key_end += count * path
        queries = q[query_begin:query_end].unflatten(0, (count, length)).transpose(1, 2)
        keys = k[key_begin:key_end].unflatten(0, (count, path)).transpose(1, 2)
        values = v[key_begin:key_end].unflatten(0, (count, path)).transpose(1, 2)
        parts.append(causal(queries, keys, values).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, window: int | None
) -> Tensor:
    """Return causal attention over sequences of one length; the result is [B, heads, T, D] like the
    query.

    There may be more keys than queries, which are those of the last T positions.
    """
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    band = None
    past = key.shape[2] - length
    if past or (window is not None and length > window):
        band = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(past)
        band = band if window is None else band.triu(past + 1 - window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=dropout,
        is_causal=band is None,
        scale=scale,
        enable_gqa=grouped,
    )


def _by_blocks(
    query: Tensor,  # [B, heads, T, D], the last T positions; the result is like it
    key: Tensor,  # [B, groups of heads, C, D]
    value: Tensor,
    sinks: Tensor | None,
    cap: float | None,
    dropout: float,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention with sinks or a soft cap, in blocks of queries whose scores backward
    computes again.
    """
    length = query.shape[2]
    keys = key.shape[2]
    parts = []
    past = keys - length
    rows = max(1, _SCORES // (query.shape[0] * query.shape[1] * keys))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = slice(0 if window is None else max(0, past + start + 1 - window), past + stop)
        tensors = query[:, :, start:stop], key[:, :, seen], value[:, :, seen], sinks
        settings = cap, dropout, scale, window or keys
        parts.append(
            checkpoint(_block, *tensors, *settings, use_reentrant=False, preserve_rng_state=dropout > 0)
        )
    return torch.cat(parts, dim=2)


def _block(
    query: Tensor,  # [B, heads, R, D], the last R positions
    key: Tensor,  # [B, groups of heads, C, D]
    value: Tensor,
    sinks: Tensor | None,
    cap: float | None,
    dropout: float,
    scale: float,
    window: int,
) -> Tensor:
    """Return the attention of the last R of C positions by a softmax of all scores, in float32 or
    wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = key.shape[1]
    columns = key.shape[2]
    q = query.to(wide).unflatten(1, (groups, -1))
    k = key.to(wide).unsqueeze(2)
    v = value.to(wide).unsqueeze(2)
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    positions = torch.arange(columns, device=query.device)
    distance = positions[-query.shape[2] :].unsqueeze(1) - positions
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = drop(scores.softmax(-1)[..., :columns], dropout)
    return (shares @ v).flatten(1, 2).to(query.dtype)


_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class _KernelWithSinks(torch.autograd.Function):
    """FlashAttention over sequences end to end, queries [N, heads, D], with a sink for each head.

    With p the softmax that includes the sink, and delta = grad . out, the gradient of a score is p
    (grad_p - delta), as without a sink, and that of a sink, whose value is zero, is the sum of
    -p_sink delta over the queries.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, settings: Any
    ) -> Tensor:
        starts, longest, scale, (left, right) = settings
        splits = {name: count for name, count in _OPTIONS.items() if name == "num_splits"}
        ctx.options = {"scale": scale, "window_size_left": left, "window_size_right": right}
        ctx.sequences = *starts, *longest, 0.0, False
        out, lse, *rest, _ = _flash_forward(
            query, key, value, *ctx.sequences, False, **ctx.options, **splits
        )
        column = sinks.float().unsqueeze(1)  # lse is [heads, N] float32
        out = (out * torch.sigmoid(lse - column).t().unsqueeze(2)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, torch.logaddexp(lse, column), *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, *rest = ctx.saved_tensors
        tensors = grad.contiguous(), query, key, value, out, lse
        grads = _flash_backward(*tensors, *ctx.sequences, *rest, **ctx.options)
        delta = torch.linalg.vecdot(grad.float(), out.float())
        of_sinks = -(torch.exp(sinks.float().unsqueeze(1) - lse) * delta.t()).sum(1)
        return *grads, of_sinks.to(sinks.dtype), None


def _kernel_takes(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return True if PyTorch's build of FlashAttention supports these tensors."""
    size = query.shape[-1]
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False  # FlashAttention needs Ampere or newer
    _choose_flash()
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and dropout == 0.0 and size == value.shape[-1] and size <= 256 and size % 8 == 0


def has_flash3() -> bool:
    """Return True on a Hopper with FlashAttention 3's package, whose kernels torch then takes in
    place of its own (`torch.nn.attention._fa3`).
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return hopper and find_spec("flash_attn_interface") is not None


def _choose_flash() -> None:
    """Make torch's FlashAttention, in the whole process, the one that is to be used."""
    wanted = "FA3" if in_use(Shortcut.FLASH3) and has_flash3() else None
    if wanted != flash.current_flash_attention_impl():
        if wanted is None:
            flash.restore_flash_attention_impl()
        else:
            flash.activate_flash_attention_impl(wanted)


AttentionInterface.register(NAME, attention)


def implementation(asked: str, model: PreTrainedModel) -> str:
    """Return the attention implementation for `asked`: `NAME` instead of sdpa if the model allows
    it, with the same result.
    """
    return NAME if asked == "sdpa" and packing_obstacle(model) is None else asked


def packing_obstacle(model: PreTrainedModel, images: bool = False) -> str | None:
    """Return the reason why sequences of this model, some with `images`, cannot be laid end to end;
    None if they can.
    """
    types = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := sorted(set(types) - set(PACKABLE_LAYERS)):
        return f"has layers ({', '.join(unknown)}) in which sequences of a pack would not be kept apart"
    mixers = len(recurrent_mixers(model))
    if mixers < sum(kind not in SHARED_LAYERS for kind in types) or (model._is_stateful and not mixers):
        return (
            "has recurrent layers of an unknown kind, which would carry state over from one sequence "
            "to the next"
        )
    if images and looks_ahead(model):
        return "lets the tokens of an image attend to later ones"
    # Hybrids do not declare the backend, although their attention layers look it up and pass all
    # arguments on.
    if not model._supports_attention_backend and not mixers:
        return "has its own attention, which does not take the ends of sequences"
    return None


def looks_ahead(model: PreTrainedModel) -> bool:
    """Return True if the tokens of an image also attend to later ones of it, so that rows with
    images need a mask.
    """
    taken = inspect.signature(model.forward).parameters
    both_ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return has_vision(model.config) and ("token_type_ids" in taken or both_ways)


def mask_images(trunk: PreTrainedModel, masked: bool) -> None:
    """Make a trunk whose images look ahead compute with Transformers' masks, or without any.

    It stays so until the next call, as a layer that checkpointing recomputes in backward needs the
    same masks again.
    """
    without, chosen = (NAME, "sdpa") if masked else ("sdpa", NAME)
    if trunk.config.get_text_config()._attn_implementation == without:
        trunk.set_attn_implementation({"": chosen, "text_config": chosen})


def require_sharing(model: PreTrainedModel, images: bool = False) -> None:
    """Raise UserError if ranks cannot share a sequence, since tokens would interact outside of
    `attention`.
    """
    obstacle = packing_obstacle(model, images)
    if obstacle is None and recurrent_mixers(model):
        obstacle = "has recurrent layers, which need all tokens of a sequence"
    if obstacle is None and model.config._attn_implementation != NAME:
        obstacle = "computes its attention in its own way"
    if obstacle is not None:
        key = "policy.sequence_parallel is above 1"
        raise UserError(f"{key}, but {type(model).__name__} {obstacle}: set it to 1")


def branching_obstacle(model: PreTrainedModel, images: bool = False) -> str | None:
    """Return the reason why sequences, some with `images`, cannot share the computation of a common
    beginning, or None.
    """
    config = model.config.get_text_config()
    if obstacle := packing_obstacle(model, images):
        return obstacle
    if config._attn_implementation != NAME:
        return "computes its attention in its own way"
    in_layers = any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
    if config.to_dict().get("attention_dropout") or in_layers:
        return "has dropout, which would be the same for all sequences with a common beginning"
    return None


def require_branches(model: PreTrainedModel, images: bool = False) -> None:
    """Raise UserError with the `branching_obstacle` of a model, if there is one."""
    if obstacle := branching_obstacle(model, images):
        raise UserError(
            f"batch.share_prefixes is true, but {type(model).__name__} {obstacle}: set it to false or "
            "auto"
        )


def require_packing(model: PreTrainedModel, images: bool = False) -> None:
    """Raise UserError if a pack would mix sequences, or if some of them have `images` and cannot be
    packed.

    Transformers' own eager attention keeps them apart by a mask from position ids, which some
    models, such as gpt-oss, do not hand on.
    """
    obstacle = packing_obstacle(model, images)
    way = model.config.get_text_config()._attn_implementation
    if obstacle is None and way not in (NAME, "sdpa") and "flash" not in way:
        may_mix = f"model.attn_implementation is {way}, which may mix the sequences of a pack"
        raise UserError(
            f"batch.packing is true, but {may_mix}: set the latter to sdpa, or the former to false"
        )
    if obstacle is not None:
        raise UserError(f"batch.packing is true, but {type(model).__name__} {obstacle}: set it to false")
