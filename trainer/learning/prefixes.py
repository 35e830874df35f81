"""Common beginnings of sequences, so that each is computed once: siblings of a group, branches, and
turns.

Sorted by their tokens, sequences with a common beginning are neighbours. Their order, and the
number of tokens that each has in common with the one before, are all that their trie depends on:

    order  tokens           in common with the one before
    0      p p p p a a      0                                  p p p p -+- a a
    2      p p p p b b c    4                                           +- b b -+- c
    1      p p p p b b d    6                                                   +- d

A hidden state depends on the tokens before it and on nothing else, so the tokens of a node need one
for all of its sequences. Two tokens are the same if everything that enters the model with them is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import msgspec
import numpy as np

from sharding.ranks import agreed, send_to_all
from trainer.learning.answers import Answer
from trainer.types import PrefixNode, Trie


@dataclass(frozen=True)
class Prefixes:
    """Sequences in the order of their tokens, each without its last token, which predicts
    nothing.
    """

    positions: list[int]  # of each sequence in the order
    # For each position, the number of tokens in common with the sequence before; first 0
    common: list[int]
    lengths: list[int]  # for each sequence, the number of its tokens
    least: int  # the fewest tokens that are worth a node of their own (`batch.shared_tokens_min`)
    # The cost of a token that a hybrid's mixers compute again (`ModelFlops.recurrent_share`)
    repeated: float = 0.0

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], least: int, repeated: float = 0.0) -> "Prefixes":
        """Return the order of sequences of tokens (`token_bytes`)."""
        order = sorted(range(len(sequences)), key=lambda row: sequences[row].tobytes())
        positions = [0] * len(order)
        common = [0] * len(order)
        for position, row in enumerate(order):
            positions[row] = position
            common[position] = _common(sequences[order[position - 1]], sequences[row]) if position else 0
        return cls(positions, common, list(map(len, sequences)), least, repeated)

    @classmethod
    def of_answers(cls, answers: Sequence[Answer], least: int, repeated: float = 0.0) -> "Prefixes":
        """Return the order of answers by their blocks of `least` tokens, whichever rank sampled
        which. Collective.

        Each rank sends 8 bytes for each block of its answers; a rest of fewer tokens counts as
        different.
        """
        with agreed("comparing the beginnings of answers"):
            local = {}
            for number, answer in enumerate(answers):
                if trajectory := answer.trajectory:
                    ids = trajectory.prompt_ids + trajectory.response_ids
                    local[number] = _digests(token_bytes(ids), least)
            message = msgspec.msgpack.encode(local)
        digests = dict[int, bytes]()
        for part in send_to_all(message):
            digests |= msgspec.msgpack.decode(part, type=dict[int, bytes])
        tables = [np.frombuffer(digests[n], "u1").reshape(-1, 8) for n in range(len(answers))]
        blocks = cls.of(tables, least)
        common = [least * count for count in blocks.common]
        lengths = [answer.length - 1 for answer in answers]
        return cls(blocks.positions, common, lengths, least, repeated)

    def sorted(self, rows: Sequence[int]) -> list[int]:
        """Return sequences in order."""
        return sorted(rows, key=self.positions.__getitem__)

    def shared(self, rows: Sequence[int]) -> list[int]:
        """Return the number of tokens that each of some sequences in order has in common with the
        one before.
        """
        positions = [self.positions[row] for row in rows]
        common = [0]
        for before, after in pairwise(positions):
            common.append(min(self.common[before + 1 : after + 1]))
        return common[: len(rows)]

    def trie(self, rows: Sequence[int]) -> Trie:
        """Return the trie of some sequences in order, which it numbers from 0.

        A stretch of fewer than `least` tokens is not shared, since its attention would cost more
        than it saves.
        """
        lengths = [self.lengths[row] for row in rows]
        shared = self.shared(rows)
        nodes = list[PrefixNode]()
        last = [-1] * len(rows)
        # First sequence, the one after the last, tokens so far, node so far
        branches = [(0, len(rows), 0, -1)]
        while branches:
            first, after, depth, parent = branches.pop()
            least = 1 if after - first == 1 else self.least
            end = min(shared[first + 1 : after], default=lengths[first])
            if end - depth >= least:
                nodes.append(PrefixNode(first, depth, end, parent, after - first))
                depth = end
                parent = len(nodes) - 1
            last[first:after] = [parent] * (after - first)
            if after - first > 1:
                cuts = [row for row in range(first + 1, after) if shared[row] - depth < self.least]
                ends = [first, *cuts, after]
                branches += [(*pair, depth, parent) for pair in reversed(list(pairwise(ends)))]
        return nodes or [PrefixNode(0, 0, 1, -1, 0)], last  # a model needs a token

    def cost(self, rows: Sequence[int], worth: Callable[[int], int] = lambda length: length) -> int:
        """Return the tokens of a trie of sequences in order, or their work, where `worth` is that
        of a sequence.

        A token that mixers compute again, for each leaf below it except one, counts `repeated`.
        """
        if not rows:
            return 0
        nodes, _ = self.trie(rows)
        parents = {node.parent for node in nodes}
        paths = sum(node.end for number, node in enumerate(nodes) if number not in parents)
        again = paths - sum(node.end - node.begin for node in nodes)
        return sum(worth(node.end) - worth(node.begin) for node in nodes) + round(self.repeated * again)

    def units(self, fits: Callable[[list[int]], bool]) -> list[list[int]]:
        """Divide all sequences into units that `fits` accepts, or of one sequence each.

        Units without a common beginning come apart first; a unit that does not fit is then cut
        along the tree.
        """
        rows = self.sorted(range(len(self.lengths)))
        cuts = [position for position in range(1, len(rows)) if self.common[position] < self.least]
        apart = [0, *cuts, len(rows)]
        waiting = [rows[begin:end] for begin, end in reversed(list(pairwise(apart)))] if rows else []
        units = []
        while waiting:
            unit = waiting.pop()
            if len(unit) == 1 or fits(unit):
                units.append(unit)
            else:
                waiting += reversed(self.cut(unit))
        return units

    def cut(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Cut a unit of several sequences in order in two, where they have least in common, and
        near the middle.
        """
        shared = self.shared(rows)
        middle = len(rows) / 2
        cut = min(range(1, len(rows)), key=lambda cut: (shared[cut], abs(cut - middle)))
        return rows[:cut], rows[cut:]


def token_bytes(ids: Sequence[int], *inputs: np.ndarray) -> np.ndarray:
    """Return all that enters a model with each token of a sequence except the last, [tokens, bytes]
    uint8.

    `inputs` are what enters besides ids, one row for each of these tokens.
    """
    columns = [np.array(ids[:-1], dtype=">u4"), *inputs]  # big-endian numbers sort like their bytes
    rows = [c.reshape(len(ids) - 1, math.prod(c.shape[1:])).view("u1") for c in columns]
    return np.concatenate(rows, axis=1)


def _digests(tokens: np.ndarray, size: int) -> bytes:
    """Return the digests of the whole blocks of `size` tokens of a sequence, 8 bytes each."""
    starts = range(0, len(tokens) - size + 1, size)
    blocks = (tokens[start : start + size].tobytes() for start in starts)
    return b"".join(blake2b(block, digest_size=8).digest() for block in blocks)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens in which two sequences agree from their beginning."""
    size = min(len(one), len(other))
    different = np.flatnonzero((one[:size] != other[:size]).any(axis=1))
    return int(different[0]) if len(different) else size
