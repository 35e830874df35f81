"""Digests against Python's own integers, and what must change them."""

import functools
import itertools
import math
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharding.wire import digests
from sharding.wire.digests import add, cut, digest, digest_of, digests_of, packed, part_of, sum_up
from sharding.wire.manifest import View
from tests.support.children import in_child

VIEWS = st.tuples(
    st.integers(0, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=3)
).map(lambda view: (view[0], tuple(n for n, _ in view[1]), tuple(s for _, s in view[1])))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks and windows so small that a few elements fill several."""
    monkeypatch.setattr(digests, "BLOCK", 8)
    monkeypatch.setattr(digests, "WINDOW", 4)


def places(view: View) -> list[int]:
    """Return the number of each element of a view, by a loop."""
    offset, shape, stride = view
    indices = itertools.product(*map(range, shape))
    return [offset + sum(i * s for i, s in zip(index, stride, strict=True)) for index in indices]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", [1200, 1203])
def test_sums_are_what_python_integers_give(dtype: torch.dtype, turned: bool, columns: int) -> None:
    """The sums of two blocks equal those of Python integers. The second block is shorter, one element in front puts
    both off the words of memory, and they have from 9 lines of words to more than a page.
    """
    memory = (torch.randn(1 + 90 * columns, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    weight = memory[1:].view(90, columns)
    blocks = [weight.t(), weight.t()[1:4]] if turned else [weight, weight[1:4]]
    lines = [line for block in blocks for line in lines_of(block)]
    expected = [sum(column) for column in zip(*lines, strict=True)]
    expected += [sum(sum(line) for line in lines[number::128]) for number in range(128)]
    expected += [
        sum(sum(line) for line in lines[first : first + 128]) for first in range(0, len(lines), 128)
    ]
    assert [n % 2**64 for n in sum_up(blocks, dtype).tolist()] == [n % 2**64 for n in expected]


def lines_of(block: Tensor) -> list[tuple[int, ...]]:
    """Return, in plain Python, the bytes of all elements in order, with zeros up to a whole line of 128 words."""
    raw = bytes(block.contiguous().view(torch.uint8).flatten().tolist())
    raw += bytes(-len(raw) % 1024)
    return [struct.unpack("128q", raw[first : first + 1024]) for first in range(0, len(raw), 1024)]


def test_elements_on_meta_count_as_zeros() -> None:
    weight = torch.randn(3, 700)
    parts = [weight[:1], torch.empty(1, 700, device="meta"), weight[2:]]
    assert sum_up(parts, weight.dtype).equal(
        sum_up([weight[:1], torch.zeros(1, 700), weight[2:]], weight.dtype)
    )
    assert not sum_up([parts[1]], weight.dtype).any() and not sum_up([], weight.dtype).any()


def test_every_flipped_bit_exchange_and_shift_changes_the_digest() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    weight[1, 1] = -weight[0, 0]  # of which one could be taken for the other by all bits but the last
    before = digest_of([weight], None)
    for element, bit in itertools.product(range(24), range(32)):
        changed = weight.clone()
        changed.view(torch.int32).view(-1)[element] ^= torch.tensor(1 << bit).to(torch.int32)
        assert digest_of([changed], None) != before
    for one, other in itertools.combinations(range(24), 2):
        order = list(range(24))
        order[one], order[other] = other, one
        assert digest_of([weight.view(-1)[order].view(4, 6)], None) != before
    for changed in (
        weight.roll(1, 0),
        weight.roll(1, 1),
        weight.view(6, 4).t().contiguous(),
        weight.flip(0),
    ):
        assert digest_of([changed], None) != before
    assert digest_of([weight[2:], weight[:2]], None) != digest_of([weight[:2], weight[2:]], None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * 2**15 - 1), st.integers(0, 31)), min_size=1, max_size=3, unique=True
    )
)
def test_up_to_three_wrong_bits_anywhere_change_the_digest(wrong: list[tuple[int, int]]) -> None:
    weight = torch.zeros(3 * 2**15)  # three pages
    for element, bit in wrong:
        weight.view(torch.int32)[element] ^= torch.tensor(1 << bit).to(torch.int32)
    assert sum_up([weight], weight.dtype).any()


@pytest.mark.parametrize("far", [1, 2, 256, 2**15, 2**15 + 256, 2**15 + 258])
def test_a_value_and_its_negative_that_changed_places_change_it(far: int) -> None:
    """A value and its negative that swap places change the digest, one word, line or page apart and in several of these
    directions.
    """
    weight = torch.zeros(3 * 2**15)
    for first in (0, 1, 2**14 + 3):
        weight.zero_()
        weight[first], weight[first + far] = 1.5, -1.5
        before = digest_of([weight], None)
        weight[first], weight[first + far] = -1.5, 1.5
        assert digest_of([weight], None) != before


@settings(max_examples=200, deadline=None)
@given(VIEWS)
def test_blocks_are_a_view_once_and_never_more_than_fits(view: View) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK", 8)
        (blocks,) = map(list, cut([view], None))
    assert all(math.prod(shape) <= 8 for _, shape, _ in blocks)
    assert [place for block in blocks for place in places(block)] == places(view)


@settings(max_examples=200, deadline=None)
@given(VIEWS, st.integers(0, 1000))
def test_a_window_is_part_of_a_view_and_the_same_of_all_views_of_its_shape(
    view: View, seed: int
) -> None:
    shape = view[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "WINDOW", 4)
        ((window,),) = map(list, cut([view], seed))
        plain = torch.arange(math.prod(shape)).view(shape)
        ((same,),) = map(list, cut([(0, shape, plain.stride())], seed))
    assert len(places(window)) >= min(4, math.prod(shape)) // 2 and math.prod(window[1]) <= 4
    assert places(window) == [places(view)[place] for place in places(same)]


@pytest.mark.usefixtures("small")
def test_windows_reach_every_element_in_the_end() -> None:
    seen = {
        place
        for seed in range(300)
        for (view,) in cut([(0, (7, 5), (5, 1))], seed)
        for place in places(view)
    }
    assert seen == set(range(35))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_parts_of_ranks_add_up_to_the_digest_of_the_whole(dtype: torch.dtype, seed: int | None) -> None:
    """The parts add up however the weight is cut, within words too, and for any view that a worker reads: rows,
    columns, transposed, all.
    """
    generator, draw = torch.Generator().manual_seed(3), random.Random(0)
    weight = (torch.randn(11, 6, generator=generator) * 50).to(dtype)
    for _ in range(20):
        bounds = [0, *sorted(draw.choices(range(67), k=3)), 66]
        for target in (weight[2:9], weight[:, 1:4], weight.t(), weight, weight[:, 2:3]):
            parts = [
                own_part(weight, begin, end, target, seed) for begin, end in itertools.pairwise(bounds)
            ]
            assert digest(functools.reduce(add, parts)) == digest_of(
                [target.clone(memory_format=torch.contiguous_format)], seed
            )


def own_part(weight: Tensor, begin: int, end: int, read: Tensor, seed: int | None) -> bytes:
    """Return the packed sums that a rank holding [begin, end) of the flat weight computes for a view of the weight."""
    views = [(int(read.storage_offset()), tuple(read.shape), read.stride())]
    values = weight.view(-1)[begin:end]
    blocks = (part_of(part, values, begin) for parts in cut(views, seed) for part in parts)
    return packed(sum_up(blocks, weight.dtype))


def test_parts_are_cast_as_they_are_sent() -> None:
    weight = torch.randn(50)
    cast = digest(packed(sum_up([part_of((0, (50,), (1,)), weight, 0)], torch.bfloat16)))
    assert cast == digest_of([weight.bfloat16()], None)


def test_weights_that_threads_share_have_the_digests_that_they_have_one_by_one() -> None:
    """Digests by several threads equal those by one, also for weights in pieces, which are first copied to a thread's
    memory.
    """
    generator = torch.Generator().manual_seed(3)
    weights = {str(n): [torch.randn(600, 500, generator=generator)[:, n : n + 400]] for n in range(60)}
    expected = {name: digest_of(tensors, None) for name, tensors in weights.items()}
    assert len(set(expected.values())) == 60
    for _ in range(5):
        assert digests_of(weights, None) == expected
    assert digests_of(weights, 7) == {name: digest_of(tensors, 7) for name, tensors in weights.items()}


def test_a_forked_process_has_its_own_threads() -> None:
    weights = {str(n): [torch.randn(600, 500)] for n in range(4)}
    expected = digests_of(weights, None)

    def digest_again() -> None:
        assert digests_of(weights, None) == expected

    assert in_child(digest_again) == 0
