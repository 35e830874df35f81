"""The trie of a micro-batch's sequences against a plain one, and its division into units."""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation.trajectory import Trajectory
from sharding.ranks import rank, world_size
from tests.support.learning_steps import on_ranks
from tests.support.shared_answers import CASES, group
from trainer.learning.answers import gather_answers
from trainer.learning.batching import SHARED_TABLE, deal, micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.metrics import share_metrics
from trainer.learning.prefixes import Prefixes, token_bytes
from trainer.types import Sample

ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def as_samples(rows: list[list[int]]) -> list[Sample]:
    return [Sample(row, [0, *[1] * (len(row) - 1)], [0.0] * len(row)) for row in rows]


def beginnings(rows: list[list[int]]) -> set[tuple[int, ...]]:
    """All distinct beginnings, whose number is that of a trie's tokens."""
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


@settings(deadline=None)
@given(ROWS, st.integers(1, 5))
def test_nodes_spell_every_sequence_and_share_what_is_long_enough(
    rows: list[list[int]], least: int
) -> None:
    samples = as_samples(rows)
    prefixes = Prefixes.of([token_bytes(s.input_ids) for s in samples], least)
    order = prefixes.sorted(range(len(rows)))
    nodes, last = prefixes.trie(order)
    through = [0] * len(nodes)
    for place, row in enumerate(order):
        spelled: list[int] = []
        number = last[place]
        while number >= 0:
            node = nodes[number]
            assert node.parent < number and node.begin < node.end
            assert node.begin == (nodes[node.parent].end if node.parent >= 0 else 0)
            spelled = samples[order[node.row]].input_ids[node.begin : node.end] + spelled
            through[number] += 1
            number = node.parent
        assert spelled == rows[row][:-1]
    assert any(len(row) > 1 for row in rows) or nodes == [(0, 0, 1, -1, 0)]
    assert through == [node.rows for node in nodes]
    assert all(node.end - node.begin >= least for node in nodes if node.rows > 1)
    if least == 1 and any(len(row) > 1 for row in rows):
        assert prefixes.cost(order) == len(beginnings([row[:-1] for row in rows]))
    work = sum(end**2 - begin**2 for _, begin, end, *_ in nodes)
    assert prefixes.cost(order, lambda length: length**2) == work


@settings(deadline=None)
@given(ROWS, st.integers(1, 60), st.integers(1, 5))
def test_shared_micro_batches_are_within_budget_and_table(
    rows: list[list[int]], budget: int, least: int
) -> None:
    samples = as_samples(rows)
    batches = micro_batches(samples, budget, 0, "cpu", packing=True, shared_min=least)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(rows)))
    for batch in batches:
        assert batch.layout.pack is not None
        assert len(batch.rows) == 1 or len(batch.layout.pack.tokens) <= budget
        assert len(batch.rows) == 1 or len(batch.rows) * max(batch.lengths) <= SHARED_TABLE * budget
        if batch.layout.pack.tree is None:  # nothing in common
            assert batch.layout.pack.lengths == [max(1, len(rows[row]) - 1) for row in batch.rows]
            continue
        assert batch.layout.pack.tree.logical_tokens == sum(
            max(1, len(rows[row]) - 1) for row in batch.rows
        )
        tokens = batch.input_ids.flatten()[batch.layout.pack.tokens].tolist()
        for (begin, end), path, length in zip(
            pairwise(batch.layout.pack.starts.tolist()),
            batch.layout.pack.tree.ranges,
            batch.layout.pack.tree.lengths,
            strict=True,
        ):
            spelled = [token for first, after in path for token in tokens[first:after]]
            assert path[-1][1] == end and len(spelled) == length and end > begin
            assert any(rows[row][:length] == spelled for row in batch.rows)


def test_a_chain_of_a_thousand_branches_needs_no_recursion() -> None:
    ids = random.Random(0).choices(range(9), k=2000)
    prefixes = Prefixes.of([token_bytes([*ids[: 2 * turn], 9, 9]) for turn in range(1, 1001)], 1)
    assert prefixes.cost(prefixes.sorted(range(1000))) == 2000 + 1000


def test_a_unit_is_cut_where_its_sequences_have_least_in_common() -> None:
    """Two prompts with a common instruction come apart before the answers of either do."""
    ids = [[1] * 5 + [prompt] * 9 + [answer] * 4 for prompt in (2, 3) for answer in range(4, 8)]
    prefixes = Prefixes.of(list(map(token_bytes, ids)), 3)
    assert prefixes.units(lambda unit: len(unit) <= 8) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert prefixes.units(lambda unit: len(unit) <= 7) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert prefixes.units(lambda unit: len(unit) <= 3) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Prefixes.of(list(map(token_bytes, ids)), 6).units(lambda unit: True) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_shared_batches_have_the_tokens_of_a_plain_trie() -> None:
    for samples in CASES.values():
        (batch,) = micro_batches(samples, 10_000, 0, "cpu", packing=True, shared_min=1)
        assert batch.layout.pack is not None
        assert len(batch.layout.pack.tokens) == max(
            1, len(beginnings([s.input_ids[:-1] for s in samples]))
        )


@settings(deadline=None, max_examples=500)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 12), st.integers(1, 6))
def test_no_rank_has_more_work_than_if_answers_were_dealt_one_by_one(
    seed: int, ranks: int, prompts: int, size: int
) -> None:
    loads, apart, _ = loads_of_ranks(seed, ranks, prompts, size)
    assert max(loads) <= max(apart)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(4, 8), st.integers(1, 6))
def test_no_rank_is_a_tenth_above_the_mean_where_each_has_several_prompts(
    seed: int, ranks: int, prompts: int, size: int
) -> None:
    loads, _, whole = loads_of_ranks(seed, ranks, ranks * prompts, size)
    assert max(loads) <= 1.1 * sum(loads) / ranks
    assert sum(loads) <= whole  # equal where every prompt has drawn one answer


def test_parts_of_a_group_that_meet_again_count_their_beginning_once() -> None:
    """Counted twice, it would leave a rank of this step more than a tenth above the mean."""
    loads, _, whole = loads_of_ranks(826003, 3, 3, 5)
    assert max(loads) <= 1.1 * sum(loads) / 3
    assert sum(loads) < whole


def loads_of_ranks(seed: int, ranks: int, prompts: int, size: int) -> tuple[list[int], list[int], int]:
    """Return the work of each rank if groups of answers are dealt out, and one by one; and the work of whole answers.

    A rank's work is counted here as a sum over all distinct beginnings.
    """
    draw, ids = random.Random(seed), list[list[int]]()
    for prompt in range(prompts):
        common = [prompt] * draw.randint(1, 16)
        for _ in range(draw.randint(1, size)):
            ids.append([*common, *draw.choices(range(3), k=draw.randint(1, 8))])
    draw.shuffle(ids)
    prefixes = Prefixes.of(list(map(token_bytes, ids)), 1)

    def work(length: int) -> int:
        return length + length**2 // 20

    def load(rows: list[int]) -> int:
        return sum(
            work(len(some)) - work(len(some) - 1) for some in beginnings([ids[row][:-1] for row in rows])
        )

    lengths = [len(row) - 1 for row in ids]
    with patch("trainer.learning.batching.world_size", lambda: ranks):
        apart, shares = deal(lengths, work, 1), deal(lengths, work, 1, prefixes)
    assert sorted(row for share in shares for row in share) == list(range(len(ids)))
    assert all(share == sorted(share) for share in shares)
    return list(map(load, shares)), list(map(load, apart)), sum(map(work, lengths))


def test_the_fullest_ranks_unit_is_cut_until_ranks_are_even() -> None:
    """Two groups stay whole on two ranks; of three, one is cut in two; what cannot be cut stays uneven."""

    def dealt(groups: int, size: int, ranks: int) -> list[list[int]]:
        prefixes = Prefixes.of(
            [token_bytes([g] * 9 + [a] * 5) for g in range(groups) for a in range(90, 90 + size)], 3
        )
        with patch("trainer.learning.batching.world_size", lambda: ranks):
            return deal([13] * groups * size, lambda length: length, 1, prefixes)

    assert dealt(2, 4, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dealt(3, 4, 2) == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]
    assert dealt(2, 1, 3) == [[0], [1], []]


def test_groups_stay_together_beside_an_answer_that_is_more_than_a_ranks_share() -> None:
    ids = [[g] * 9 + [a] * 5 for g in range(2) for a in range(90, 94)] + [[5] * 200]
    prefixes = Prefixes.of(list(map(token_bytes, ids)), 3)
    with patch("trainer.learning.batching.world_size", lambda: 3):
        assert deal([len(row) - 1 for row in ids], lambda length: length, 1, prefixes) == [
            [8],
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]


def test_all_ranks_know_the_order_of_answers_whichever_rank_sampled_them() -> None:
    """Common tokens count in whole blocks of `least`: of the 9 of each prompt, 8."""
    step = [Trajectory(p, s, [p] * 9, [s, 1], [1, 1], [0.0] * 2) for p in range(4) for s in range(3)]
    step += [Trajectory(4, 0, [], [7], [1], [0.0]), Trajectory(4, 1, [3] * 30, [], [], [])]

    def prompt_order(by: Callable[[Trajectory], int]) -> Prefixes:
        return Prefixes.of_answers(
            gather_answers([t for t in step if by(t) % world_size() == rank()]), least=4
        )

    for by in (lambda t: t.prompt_index, lambda t: t.sample_index, lambda t: 0):
        first, second = on_ranks(2, partial(prompt_order, by))
        assert first == second == on_ranks(1, partial(prompt_order, by))[0]
    assert (
        first.lengths == [10] * 12 + [0, 29]
        and first.cost(first.sorted([9, 10, 11, 13])) == 8 + 3 * 2 + 29 - 8
    )
    units = sorted(map(sorted, first.units(lambda unit: True)))
    assert units == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11, 13],
        [12],
    ]


def test_tokens_lost_to_routes_are_those_that_equal_routes_would_share() -> None:
    """Distinct beginnings of tokens with their routes, less distinct beginnings of tokens alone."""
    samples, routed = group(4, 20, [6]), list[list[int]]()
    for number, (sample, place) in enumerate(zip(samples, (9, 15, 15, 0), strict=True)):
        first = torch.tensor([token % 4 for token in sample.input_ids[:-1]])
        first[place:] = number
        sample.routes = torch.stack([first, torch.full_like(first, 4)], 1).unsqueeze(1).to(torch.uint8)
        routed.append((torch.tensor(sample.input_ids[:-1]) + 100 * first).tolist())  # a number for both
    batches = micro_batches(samples, 60, 0, "cpu", packing=True, shared_min=1)
    assert len(batches) == 2
    lost = 0
    for rows in (batch.rows for batch in batches):
        lost += len(beginnings([routed[row] for row in rows]))
        lost -= len(beginnings([samples[row].input_ids[:-1] for row in rows]))
    groups: list[Any] = [[[answer] for answer in range(4)]]
    assert share_metrics([MiniBatch(groups, batches, 1, 4)], 1)["share/lost_to_routes"] == lost > 0
