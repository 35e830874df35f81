"""The sum W + scale · B A of a weight and its low-rank adapter (LoRA, Hu et al. 2021,
arXiv:2106.09685, equation 3), computed with the same bits in all processes.

A training rank computes it to stage a weight, to digest it and to save it; a worker that reads the
rank's shards computes it for itself. The last bit of a product depends on how many rows are
multiplied at once, and on the number of threads. So the product is always computed in the same
blocks of whole rows, by one thread, whichever of its elements are needed. The number of rows in a
block depends on the weight's width alone.

Two alternatives were rejected: r sums of outer products, element by element, whose bits never vary
(2 r passes over a block), and sums that ranks write to shared memory before workers read them (one
more copy, and as much memory as the weights).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

BLOCK = 1 << 18
"""Elements of a block of the product: 1 MiB, still in a core's cache when it is added to W."""


class Factors(NamedTuple):
    """The factors of the adapter of a weight [out, in], unsharded: `a` [r, in] and `b` [out, r],
    float32, which share memory with nothing else.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def add(
        self,
        values: torch.Tensor,
        offset: int,
        take: Callable[[int, torch.Tensor], None],
        wanted: Callable[[int, int], bool] = lambda first, count: True,
    ) -> None:
        """Compute the sums for elements [offset, offset + n) of the weight, a block at a time.

        `values` [n]: these elements of W, of any dtype, on any device; padding after the weight's
        end is ignored. `take`: called with the number of a block's first element and the sums, a
        new float32 tensor. `wanted`: (first element, count) -> True if any of these elements are
        needed; other blocks are skipped.
        """
        width = self.a.shape[1]
        rows = max(BLOCK // width, 1)
        end = min(offset + len(values), len(self.b) * width)
        with _one_thread():
            for top in range(offset // width // rows * rows, -(-end // width), rows):
                first = max(top * width, offset)
                last = min((top + rows) * width, end)
                start = top * width
                if wanted(first, last - first):
                    sums = (
                        (self.b[top : top + rows] @ self.a)
                        .mul_(self.scale)
                        .view(-1)[first - start : last - start]
                    )
                    base = torch.empty_like(sums).copy_(
                        values[first - offset : last - offset], non_blocking=True
                    )
                    take(first, base.add_(sums))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one CPU thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
