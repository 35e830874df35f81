"""Sequence parallelism: ranks that share a micro-batch, each with a part of its tokens, exchange
tokens for heads.

A rank computes norms, projections, MLPs and the output head for its tokens alone. Only attention
needs other tokens: before it, an all-to-all gives each rank all tokens for a part of the heads, and
after it another returns the tokens with all heads, as in DeepSpeed Ulysses (Jacobs et al. 2023,
arXiv:2309.14509), section 3.

Legend: n ranks share N tokens, of which this rank has M; H heads of D elements.
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
    """Return the process group of this rank and its neighbours, `count` ranks together. The first
    call is collective.
    """
    return _groups(dist.group.WORLD, count)[rank() // count]


@lru_cache(maxsize=4)
def _groups(world: dist.ProcessGroup | None, count: int) -> list[dist.ProcessGroup]:
    """Group of neighbours, the same for all models, and not FSDP's, whose gathers may still be in
    progress.
    """
    return [dist.new_group(range(first, first + count)) for first in range(0, world_size(), count)]


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows [R, W] in a group; `sizes_in` and `sizes_out` are the numbers of rows
    from and to ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes_in: list[int], sizes_out: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = sizes_out, sizes_in, group
        received = rows.new_empty(sum(sizes_in), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), sizes_in, sizes_out, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, *ctx.back), None, None, None


def heads_for_tokens(
    parts: Sequence[int], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of all heads [1, H, M, D] for all tokens of its heads [1, H / n,
    N, D].

    `parts` has the number of tokens on each of the n ranks. Keys and values may have fewer heads
    than queries; if n does not divide their number, heads are repeated until it does. Collective
    among the ranks that share.
    """
    ways = len(parts)
    tokens = query.shape[2]
    dealt = []
    for heads in (query, key, value):
        count = heads.shape[1]
        heads = heads[0]
        if count % ways:
            heads = heads.repeat_interleave(math.lcm(count, ways) // count, dim=0)
        dealt.append(heads.unflatten(0, (ways, -1)).permute(0, 2, 1, 3))  # [n, M, H / n, D]
    rows = torch.cat([heads.flatten(2) for heads in dealt], dim=2).flatten(0, 1)
    received = _Exchange.apply(rows, list(parts), [tokens] * ways, neighbours(ways))
    sizes = [heads.shape[2:] for heads in dealt]
    columns = received.split([heads * width for heads, width in sizes], dim=1)
    parted = []
    for part, size in zip(columns, sizes, strict=True):
        parted.append(part.unflatten(1, size).transpose(0, 1).unsqueeze(0))
    q, k, v = parted
    return q, k, v


def tokens_for_heads(parts: Sequence[int], result: Tensor) -> Tensor:
    """Exchange attention's result for this rank's heads [1, N, H / n, D] for that of its tokens [1,
    M, H, D].
    """
    ways, heads, width = len(parts), *result.shape[2:]
    tokens = parts[rank() % ways]
    received = _Exchange.apply(result[0].flatten(1), [tokens] * ways, list(parts), neighbours(ways))
    return (
        received.view(ways, tokens, heads, width).transpose(0, 1).reshape(1, tokens, ways * heads, width)
    )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, ways: int) -> Tensor:
        total = parts.clone()
        dist.all_reduce(total, group=neighbours(ways))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def sum_over_parts(parts: Tensor, ways: int) -> Tensor:
    """Return the sum over the ranks that share, each of which then computes the same loss.
    Collective among them.

    A rank's gradient is the derivative of this one loss with respect to its part.
    """
    summed: Tensor = _Sum.apply(parts, ways)
    return summed
