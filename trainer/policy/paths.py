"""The paths from a trie's root, as rows of tokens: those of its nodes for attention, those of its
leaves for recurrent mixers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.types import PrefixTree


class RowPaths(NamedTuple):
    """The rows of tokens that a layer computes for a pack in which each row must be whole.

    Example: a prompt of 4 tokens with answers of 2 and 3 has rows of the lengths [6, 7], of which
    the pack has [6, 3] tokens: the prompt's come from the first row, and all 9 are in order.
    """

    lengths: Sequence[int]  # the number of tokens of each row
    last: Sequence[int]  # the number of tokens at each row's end that no row before it has
    # The ranges of each row's tokens among those of the pack; empty if the rows are the pack
    ranges: list[list[tuple[int, int]]]

    @property
    def repeated(self) -> int:
        """The number of tokens that rows have besides those of the pack."""
        return sum(self.lengths) - sum(self.last)


def leaf_paths(tree: PrefixTree) -> RowPaths:
    """Return the paths to the leaves of a tree, which have all of its tokens."""
    nodes = tree.trie[0]
    parents = {node.parent for node in nodes}
    leaves = [number for number in range(len(nodes)) if number not in parents]
    ranges = [tree.ranges[leaf] for leaf in leaves]
    # Nodes are in depth-first order, so a path ends with all tokens after those of the one before
    ends = [path[-1][1] for path in ranges]
    last = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    return RowPaths([tree.lengths[leaf] for leaf in leaves], last, ranges)


class Paths(torch.autograd.Function):
    """The rows [L, ...] of a tree's paths from those of its nodes [N, ...].

    Backward adds range after range, in float32 or wider: an index with repetitions would have its
    gradients added in another order each time on CUDA, and rounded to bfloat16 after each.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranges: list[list[tuple[int, int]]]) -> Tensor:
        ctx.ranges = ranges
        ctx.shape = rows.shape
        return torch.cat([rows[begin:end] for path in ranges for begin, end in path])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sums over all paths of each row's gradients."""
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        first = 0
        for path in ctx.ranges:
            for begin, end in path:
                last = first + end - begin
                total[begin:end] += grad[first:last]
                first = last
        return total.to(grad.dtype), None
