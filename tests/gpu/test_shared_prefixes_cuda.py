"""Attention by paths, and both gathers, on a GPU. Skipped without a GPU.

It has run on no real one yet.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.policy import attention
from trainer.policy.module import _SharedStates
from trainer.policy.packing import make_prefix_tree
from trainer.policy.paths import Paths
from trainer.types import PrefixNode, PrefixTree

pytestmark = pytest.mark.gpu

ANSWERS, PROMPT, ANSWER = 16, 300, 40
NODES = [
    PrefixNode(0, 0, PROMPT, -1, ANSWERS),
    *[PrefixNode(n, PROMPT, PROMPT + ANSWER, 0, 1) for n in range(ANSWERS)],
]
LENGTHS = [node.end - node.begin for node in NODES]
STARTS = [0, *itertools.accumulate(LENGTHS)]


def gradients(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> list[Tensor]:
    """Attention's result, and the gradients of its inputs, on the tensors' device."""
    tree = make_prefix_tree((NODES, []), STARTS)
    moved = PrefixTree(
        tree.ranges, tree.lengths, tree.starts.to(query.device), tree.trie, tree.logical_tokens
    )
    pack: dict[str, Any] = {
        "cu_seq_lens_q": torch.tensor(STARTS, dtype=torch.int32, device=query.device)
    }
    pack |= {
        "max_length_q": max(LENGTHS),
        "sequence_lengths": LENGTHS,
        "sliding_window": window,
        "tree": moved,
    }
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out, _ = attention.attention(nn.Identity(), *leaves, None, **pack)
    factors = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    return [out.detach(), *torch.autograd.grad((out * factors).sum(), leaves)]


@pytest.mark.parametrize("window", [None, 25, 200])
@pytest.mark.parametrize("size", [64, 128])
def test_the_kernel_attends_to_paths_as_masks_do_with_equal_bits_each_time(
    size: int, window: int | None
) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, STARTS[-1], size, generator=draw).bfloat16() for heads in (28, 4, 4)
    ]
    exact = gradients(*(x.float() for x in tensors), window)
    first = gradients(*(x.cuda() for x in tensors), window)
    for got, wanted in zip(first, exact, strict=True):
        assert float((got.cpu().float() - wanted).norm()) <= 0.02 * float(wanted.norm())
    for _ in range(3):  # the gathers alone are repeated below
        again = gradients(*(x.cuda() for x in tensors), window)
        assert torch.equal(again[0], first[0])


def test_both_gathers_have_equal_bits_in_twenty_repetitions() -> None:
    """With `index_select` in their place, terms would be added in another order each time."""
    draw = torch.Generator().manual_seed(0)
    tree = make_prefix_tree((NODES, []), STARTS)
    rows = torch.randn(STARTS[-1], 4, 64, generator=draw).cuda().requires_grad_()
    paths = torch.randn(sum(tree.lengths), 4, 64, generator=draw).cuda()
    states = torch.full((1000,), PROMPT - 1).cuda()
    picked = torch.randn(1000, 4, 64, generator=draw).cuda()
    first: list[Tensor] = []
    for _ in range(20):
        got = [
            torch.autograd.grad(Paths.apply(rows, tree.ranges), rows, paths)[0],
            torch.autograd.grad(_SharedStates.apply(rows, 0, states), rows, picked)[0],
        ]
        first = first or got
        assert all(torch.equal(one, other) for one, other in zip(first, got, strict=True))
    torch.testing.assert_close(first[1][PROMPT - 1], picked.sum(0), atol=1e-3, rtol=1e-4)
