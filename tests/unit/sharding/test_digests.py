"""Digests against Python's own integers, and what must change them."""

import itertools
import math
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharding.wire import manifest
from sharding.wire.manifest import MODULUS, View, cut, digest, digest_tensors, part_of

VIEWS = st.tuples(
    st.integers(0, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=3)
).map(lambda view: (view[0], tuple(n for n, _ in view[1]), tuple(s for _, s in view[1])))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and windows so small that a few elements fill several."""
    monkeypatch.setattr(manifest, "BLOCK", 8)
    monkeypatch.setattr(manifest, "WINDOW", 4)


def places(view: View) -> list[int]:
    """The number of each element of a view, by a loop."""
    offset, shape, stride = view
    indices = itertools.product(*map(range, shape))
    return [offset + sum(i * s for i, s in zip(index, stride, strict=True)) for index in indices]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", [12, 13])
def test_a_digest_is_what_python_integers_give(dtype: torch.dtype, turned: bool, columns: int) -> None:
    """Of two blocks, of which the second is shorter, behind an element that puts them off the words of memory."""
    memory = (torch.randn(1 + 9 * columns, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    weight = memory[1:].view(9, columns)
    blocks = [weight.t(), weight.t()[1:4]] if turned else [weight, weight[1:4]]
    sums = [sum(m * w for m, w in zip(multipliers(), words(block), strict=False)) for block in blocks]
    assert digest(blocks) == (sums[0] * manifest._STEP + sums[1]) % MODULUS
    assert digest(blocks[::-1]) == (sums[1] * manifest._STEP + sums[0]) % MODULUS


def multipliers() -> list[int]:
    found = manifest._multipliers(300, torch.device("cpu")).tolist()
    whole = manifest._multipliers(2 * manifest.BLOCK, torch.device("cpu"))
    assert all(multiplier % 2 for multiplier in found) and found == whole[:300].tolist()
    return found


def words(block: Tensor) -> tuple[int, ...]:
    """By Python: the bytes of all elements in order, and zeros up to a whole word."""
    raw = bytes(block.contiguous().view(torch.uint8).flatten().tolist())
    raw += bytes(-len(raw) % 4)
    return struct.unpack(f"{len(raw) // 4}i", raw)


def test_every_single_bit_every_exchange_and_every_shift_changes_it() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    weight[1, 1] = -weight[0, 0]  # of which one could be taken for the other by all bits but the last
    before = digest([weight])
    for element, bit in itertools.product(range(24), range(32)):
        changed = weight.clone()
        changed.view(torch.int32).view(-1)[element] ^= torch.tensor(1 << bit).to(torch.int32)
        assert digest([changed]) != before
    for one, other in itertools.combinations(range(24), 2):
        order = list(range(24))
        order[one], order[other] = other, one
        assert digest([weight.view(-1)[order].view(4, 6)]) != before
    for changed in (weight.roll(1, 0), weight.roll(1, 1), weight.view(6, 4).t().contiguous(), weight.flip(0)):
        assert digest([changed]) != before
    assert digest([weight[2:], weight[:2]]) != digest([weight[:2], weight[2:]])


@settings(max_examples=200, deadline=None)
@given(VIEWS)
def test_blocks_are_a_view_once_and_never_more_than_fits(view: View) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "BLOCK", 8)
        (blocks,) = map(list, cut([view], None))
    assert all(math.prod(shape) <= 8 for _, shape, _ in blocks)
    assert [place for block in blocks for place in places(block)] == places(view)


@settings(max_examples=200, deadline=None)
@given(VIEWS, st.integers(0, 1000))
def test_a_window_is_part_of_a_view_and_the_same_of_all_views_of_its_shape(view: View, seed: int) -> None:
    shape = view[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "WINDOW", 4)
        ((window,),) = map(list, cut([view], seed))
        plain = torch.arange(math.prod(shape)).view(shape)
        ((same,),) = map(list, cut([(0, shape, plain.stride())], seed))
    assert len(places(window)) >= min(4, math.prod(shape)) // 2 and math.prod(window[1]) <= 4
    assert places(window) == [places(view)[place] for place in places(same)]


@pytest.mark.usefixtures("small")
def test_windows_reach_every_element_in_the_end() -> None:
    seen = {place for seed in range(300) for (view,) in cut([(0, (7, 5), (5, 1))], seed) for place in places(view)}
    assert seen == set(range(35))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_parts_of_ranks_add_up_to_the_digest_of_the_whole(dtype: torch.dtype, seed: int | None) -> None:
    """However it is cut, within words too, and whatever view of it a worker reads: rows, columns, turned, all."""
    generator, draw = torch.Generator().manual_seed(3), random.Random(0)
    weight = (torch.randn(11, 6, generator=generator) * 50).to(dtype)
    for _ in range(20):
        bounds = [0, *sorted(draw.choices(range(67), k=3)), 66]
        for target in (weight[2:9], weight[:, 1:4], weight.t(), weight, weight[:, 2:3]):
            parts = [own_part(weight, begin, end, target, seed) for begin, end in itertools.pairwise(bounds)]
            assert sum(parts) % MODULUS == digest_tensors([target.clone(memory_format=torch.contiguous_format)], seed)


def own_part(weight: Tensor, begin: int, end: int, read: Tensor, seed: int | None) -> int:
    """What a rank that holds [begin, end) of the flat weight says of a view of it."""
    views = [(int(read.storage_offset()), tuple(read.shape), read.stride())]
    values = weight.view(-1)[begin:end]
    return digest(part_of(part, values, begin, weight.dtype) for parts in cut(views, seed) for part in parts)


def test_parts_are_cast_as_they_are_sent() -> None:
    weight = torch.randn(50)
    assert digest([part_of((0, (50,), (1,)), weight, 0, torch.bfloat16)]) == digest([weight.bfloat16()])
