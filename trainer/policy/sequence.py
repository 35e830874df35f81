"""Sequence parallelism: ranks that share a micro-batch, each with a part of its tokens, trade tokens for heads.

A rank computes norms, projections, MLPs and the output head for its own tokens alone. Only attention looks at other
tokens: before it, an all-to-all gives each rank all tokens of a part of the heads, and after it another gives the
tokens back with all heads. As in DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509), section 3.

Legend: n ranks share N tokens, of which this one has M; H heads of D elements.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sharding.ranks import rank, world_size


def neighbours(count: int) -> dist.ProcessGroup:
    """The group of this rank among groups of `count` neighbouring ranks. The first call is collective."""
    return _groups(dist.group.WORLD, count)[rank() // count]


@lru_cache(maxsize=4)
def _groups(world: dist.ProcessGroup | None, count: int) -> list[dist.ProcessGroup]:
    """The same groups for all models among the same ranks, and others than FSDP's, whose gathers nobody waits for."""
    return [dist.new_group(range(first, first + count)) for first in range(0, world_size(), count)]


class _Exchange(torch.autograd.Function):
    """Rows [R, W] to the ranks of a group, `going` of them to each, and as many from each as `coming` says."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, coming: list[int], going: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = going, coming, group
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, going, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, *ctx.back), None, None, None


def heads_for_tokens(parts: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens of all heads [1, H, M, D] all tokens of its heads [1, H / n, N, D].

    `parts` are the numbers of tokens on each of the n ranks. Keys and values may have fewer heads than queries; where n
    does not divide their number, each is repeated until it does. Collective among the ranks that share.
    """
    ways, own = len(parts), query.shape[2]
    dealt = []
    for heads in (query, key, value):
        count = heads.shape[1]
        heads = heads[0].repeat_interleave(math.lcm(count, ways) // count, dim=0) if count % ways else heads[0]
        dealt.append(heads.unflatten(0, (ways, -1)).permute(0, 2, 1, 3))  # [n, M, H / n, D]
    rows = torch.cat([each.flatten(2) for each in dealt], dim=2).flatten(0, 1)
    received = _Exchange.apply(rows, list(parts), [own] * ways, neighbours(ways))
    sizes = [each.shape[2:] for each in dealt]
    columns = received.split([heads * width for heads, width in sizes], dim=1)
    q, k, v = (each.unflatten(1, size).transpose(0, 1).unsqueeze(0) for each, size in zip(columns, sizes, strict=True))
    return q, k, v


def tokens_for_heads(parts: Sequence[int], result: Tensor) -> Tensor:
    """The way back: from attention's result for this rank's heads [1, N, H / n, D] its own tokens' [1, M, H, D]."""
    ways, heads, width = len(parts), *result.shape[2:]
    own = parts[rank() % ways]
    received = _Exchange.apply(result[0].flatten(1), [own] * ways, list(parts), neighbours(ways))
    return received.view(ways, own, heads, width).transpose(0, 1).reshape(1, own, ways * heads, width)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, ways: int) -> Tensor:
        whole = parts.clone()
        dist.all_reduce(whole, group=neighbours(ways))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def whole(parts: Tensor, ways: int) -> Tensor:
    """The sum over the ranks that share, each of which then computes the same loss. Collective among them.

    A rank's gradient is that of this one loss by its own part.
    """
    summed: Tensor = _Sum.apply(parts, ways)
    return summed
