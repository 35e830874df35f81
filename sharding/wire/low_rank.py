"""The sum W + scale · B A (arXiv 2106.09685, eq. 3), the same bits wherever it is made.

A rank makes it to stage a weight, to digest it and to save it, and a worker that reads the rank's
shards makes it for itself. The last bit of a product depends on how many rows are multiplied, and
by how many threads. So it is always the product of the same blocks of whole rows by one thread,
whichever elements of them are asked for: only the weight's width decides how many rows are in one.
Two other ways were weighed: r sums of outer products, element by element, whose bits nothing can
change (2 r passes over a block), and ranks that add everything up in shared memory before workers
read (a copy more, and as much memory as the weights).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

BLOCK = 1 << 18
"""Elements of a product made at once: 1 MiB, which is still in a core's cache when it is added."""


class Factors(NamedTuple):
    """Both factors of a weight [out, in], whole: `a` [r, in] and `b` [out, r], float32, in memory
    of their own.
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
        """Make the sums for the weight's elements [offset, offset + n), a block at a time. `values`
        [n]: those of W, of any dtype, on any device. Padding behind the weight's end is left out.
        `take`: gets the number of a block's first element and the sums, new and float32. `wanted`:
        (first element, count) -> True if any of these elements are needed.
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
    """Restrict torch on the CPU to one thread for the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
