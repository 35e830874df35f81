"""Layouts of micro-batches: the index of each target in the input, padded, packed, or with
beginnings once.
"""

from itertools import pairwise

import torch
from torch import Tensor

from trainer.types import Layout, Pack, PrefixNode, PrefixTree, Trie


def make_layout(
    loss_mask: Tensor,
    lengths: list[int],
    packed: bool = False,
    ways: int = 1,
    part: int = 0,
    trie: Trie | None = None,
) -> Layout:
    """Return the layout for a mask [B, T-1] on the host.

    With packing, it is that of number `part` of the `ways` ranks that share the pack. With a
    `trie`, common beginnings are computed once.

    Example: with 2 ranks, the first has 2 of the 5 tokens in `Layout`'s example and target 1; the
    second has 3 tokens, targets [4, 5] and states [1, 2].
    """
    width = loss_mask.shape[1]
    targets = loss_mask.flatten().nonzero().squeeze(1)
    if not packed:
        return Layout(targets, targets)
    sequences = [PrefixNode(row, 0, max(1, length - 1), -1, 1) for row, length in enumerate(lengths)]
    nodes = sequences if trie is None else trie[0]
    sizes = [node.end - node.begin for node in nodes]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    rows = targets // width
    columns = targets % width
    positions = torch.cat([torch.arange(node.begin, node.end) for node in nodes])
    tokens = positions + torch.tensor([n.row for n in nodes]).repeat_interleave(torch.tensor(sizes)) * (
        width + 1
    )
    states = starts[rows] + columns if trie is None else pack_indices(trie, starts, width)[rows, columns]
    missing = ways - len(tokens)
    if missing > 0:
        # Transformers' modules need a token on each rank: add a sequence whose outputs are not used
        nodes = [*nodes, PrefixNode(0, 0, missing, -1, 0)]
        sizes = [*sizes, missing]
        starts = torch.cat([starts, starts[-1:] + missing])
        tokens = torch.cat([tokens, tokens.new_zeros(missing)])
        positions = torch.cat([positions, torch.arange(missing)])
    ends = [len(tokens) * number // ways for number in range(ways + 1)]
    parts = [end - begin for begin, end in pairwise(ends)]
    mine = slice(ends[part], ends[part + 1])
    here = (states >= mine.start) & (states < mine.stop)
    tree = None if trie is None else make_prefix_tree((nodes, trie[1]), starts.tolist())
    pack = Pack(tokens[mine], positions[mine], starts.int(), sizes, parts, mine.start, tree)
    return Layout(targets[here], states[here] - mine.start, pack)


def pack_indices(trie: Trie, starts: Tensor, width: int) -> Tensor:
    """Return the index in a pack of each sequence's tokens, [B, width] int64, 0 behind them."""
    nodes, last = trie
    indices = torch.zeros(len(last), width, dtype=torch.int64)
    for line, number in zip(indices, last, strict=True):
        while number >= 0:
            node = nodes[number]
            line[node.begin : node.end] = torch.arange(node.end - node.begin) + starts[number]
            number = node.parent
    return indices


def make_prefix_tree(trie: Trie, starts: list[int]) -> PrefixTree:
    """Return the paths of a trie's nodes, which begin at these indices [S+1] in a pack.

    Example: a prompt of 4 tokens with answers of 2 and 3 has starts [0, 4, 6, 9] and the paths [(0,
    4)], [(0, 6)], and [(0, 4), (6, 9)], of 4, 6 and 7 tokens.
    """
    ranges: list[list[tuple[int, int]]] = []
    for node, (begin, end) in zip(trie[0], pairwise(starts), strict=True):
        above = ranges[node.parent] if node.parent >= 0 else []
        if above and above[-1][1] == begin:
            *above, (begin, _) = above
        ranges.append([*above, (begin, end)])
    lengths = [node.end for node in trie[0]]
    logical = trie[1].count(-1) + sum(node.rows * (node.end - node.begin) for node in trie[0])
    return PrefixTree(ranges, lengths, torch.tensor([0, *lengths]).cumsum(0).int(), trie, logical)
