"""Weights larger than a bucket travel in parts: what a part holds, where a worker puts it, what may not go missing."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sharding.ranks import RemoteError
from sharding.send.buckets import ALIGNMENT, Bucket, BucketPlan
from sharding.send.source import FsdpWeightSource
from sharding.wire.manifest import Piece, SourceParameter, Stretch
from sharding.worker import extension
from sharding.worker.recording import RecordedCopy
from tests.support.in_process import InProcess, SmallModel, small_weights

BUCKET = 1024
TIMES = 20
"""So many times the rows of the small model: each of its matrices is larger than a bucket, its vectors are not."""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([512, 2048, 5120]),
)
def test_parts_hold_every_element_once_where_the_gather_puts_it(
    sizes: list[int], shards: int, bound: int
) -> None:
    """The parts of a parameter of several tensors, whose elements are their own numbers, equal a cut, padded and
    gathered copy.
    """
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    pieces = tuple(Piece(str(n), "float32", (size,), 4 * ends[n]) for n, size in enumerate(sizes))
    shard = math.ceil(ends[-1] / shards)
    padded = torch.full((shards, shard), -1.0)
    padded.view(-1)[: ends[-1]] = torch.arange(ends[-1])
    parameter = SourceParameter("fused", padded.nbytes, pieces, shards)
    plan = BucketPlan(
        [parameter, SourceParameter("behind", 8, (Piece("b", "float32", (2,), 0),))], bound, unsplit=()
    )
    assert plan.capacity <= max(bound, shards * ALIGNMENT)
    tensors = {piece.name: torch.full(piece.shape, -2.0) for piece in pieces}
    for bucket in plan.buckets:
        buffer = torch.full((bucket.nbytes // 4,), -3.0)
        for slot in bucket.slots:
            if slot.parameter is parameter:
                part = padded[:, slot.start // 4 :][:, : slot.nbytes // 4 // shards]
                buffer[slot.offset // 4 :][: part.numel()] = part.reshape(-1)
        for got in [*bucket.stretches(), *map(whole_stretch, bucket.pieces())]:
            if got.name != "b":
                target = tensors[got.name][got.first : got.first + got.count]
                assert (target == -2).all(), "it came before"
                target.copy_(buffer[got.offset // 4 :][: got.count])
    assert torch.equal(torch.cat([*tensors.values()]), torch.arange(ends[-1], dtype=torch.float32))


def whole_stretch(piece: Piece) -> Stretch:
    return Stretch(piece.name, piece.dtype, 0, math.prod(piece.shape), piece.offset)


def test_weights_that_must_stay_whole_are_not_cut() -> None:
    pieces = (Piece("a", "uint8", (3000,), 0), Piece("b", "uint8", (3000,), 3000))
    for uncut_names, capacity in ((("b",), 6144), (("c",), 1024), (None, 6144)):
        assert (
            BucketPlan([SourceParameter("ab", 6000, pieces, 2)], 1024, uncut_names).capacity == capacity
        )


def test_the_largest_weights_of_7b_in_bfloat16_go_through_a_gibibyte() -> None:
    embedding = 152064 * 3584 * 2
    for ranks in (1, 2, 4, 8, 64):
        parameters = [SourceParameter(name, embedding, (), ranks) for name in ("embedding", "head")]
        assert BucketPlan(parameters, 512 << 20, unsplit=()).capacity <= 512 << 20
        assert BucketPlan(parameters, 512 << 20).capacity == embedding


VIEWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(VIEWS, st.integers(0, 9), st.integers(0, 60), st.integers(1, 60))
def test_a_copy_is_cut_into_the_ranges_that_counting_elements_gives(
    dimensions: list[tuple[int, int]], offset: int, first: int, count: int
) -> None:
    """Views of any strides, also overlapping ones, are compared with a count of all elements, one by one."""
    shape, stride = (tuple(column) for column in zip(*dimensions, strict=True))
    places = offset + sum(
        torch.arange(n).view(-1, *[1] * (len(shape) - 1 - i)) * s for i, (n, s) in enumerate(dimensions)
    )
    target = torch.full(shape, -1)
    values = torch.arange(first, first + count)
    for part in RecordedCopy(offset, shape, stride, target).within(first, first + count):
        assert (part.target == -1).all(), "written before"
        part.target.copy_(part.source(values))
    inside = (places >= first) & (places < first + count)
    assert torch.equal(target, torch.where(inside, places, -1))


def started(
    tmp_path: Path, rank: int = 0, ranks: int = 1, times: int = TIMES, **options: object
) -> tuple[InProcess, dict[str, Tensor]]:
    """Return a sync pair after the first sync, which records; the weights have changed since."""
    weights = small_weights(0, times)
    source = FsdpWeightSource(list(weights.items()), torch.float32)
    both = InProcess(
        source, SmallModel(rank, ranks, times=times), tmp_path, **({"bucket_bytes": BUCKET} | options)
    )
    both.sync(1)
    for weight in weights.values():
        weight.add_(torch.randn(weight.shape))
    return both, weights


def opened_and_closed(both: InProcess) -> tuple[int, int]:
    """Return how many times the worker has mapped staging memory, and how many times it has unmapped it."""
    return both.manager.report.staging_opened, both.manager.report.staging_closed


def assert_holds(model: SmallModel, weights: dict[str, Tensor]) -> None:
    twin = SmallModel(model.rank, model.ranks, times=len(weights["scaled"]) // 3)
    twin.load_weights(weights.items())
    for name, parameter in twin.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_after_the_first_update_staging_is_bounded_and_workers_find_their_slices(
    tmp_path: Path, rank: int, ranks: int
) -> None:
    both, weights = started(tmp_path, rank, ranks)
    manager = both.manager
    assert manager.report.staging_bytes == 2 * 6144, "the 5760 bytes of `a`"
    assert opened_and_closed(both) == (1, 1), "no longer needed as large as that"
    for version in (2, 3):
        both.sync(version)
        assert manager.report.staging_bytes == 2 * BUCKET
        assert manager.report.verified == "full" and set(manager.report.unreplayable or {}) == {"scaled"}
        assert_holds(both.worker.model, weights)
        weights["a"] += 1
    assert opened_and_closed(both) == (2, 1)
    manager.close()


def test_weights_that_only_a_loader_understands_are_sent_whole(tmp_path: Path) -> None:
    both, weights = started(tmp_path, times=60, bucket_bytes=512)
    both.sync(2)
    assert both.manager.report.staging_bytes == 2 * 1024, (
        "the 720 bytes of `scaled`, everything else in parts"
    )
    assert_holds(both.worker.model, weights)
    both.manager.close()


def test_staging_is_as_large_as_before_where_nothing_is_recorded(tmp_path: Path) -> None:
    both, weights = started(tmp_path, replay=False)
    kept = opened_and_closed(both)
    both.sync(2)
    assert both.manager.report.staging_bytes == 2 * 6144, "the 5760 bytes of `a`"
    assert opened_and_closed(both) == kept == (1, 0)
    assert_holds(both.worker.model, weights)
    both.manager.close()


def altered(change: Callable[[list[Stretch]], list[Stretch]]) -> object:
    stretches = Bucket.stretches
    return mock.patch.object(Bucket, "stretches", lambda self: change(stretches(self)))


CHANGES: dict[str, Callable[[list[Stretch]], list[Stretch]]] = {
    "only 704 of 960 elements of b were sent": lambda parts: [
        p for p in parts if (p.name, p.first) != ("b", 0)
    ],
    "elements 0 to 256 of a arrived a second time": lambda parts: (
        parts + [p for p in parts if p.name == "a"][:1]
    ),
    "elements 255 to 511 of a arrived a second time": lambda parts: [
        dataclasses.replace(p, first=255) if (p.name, p.first) == ("a", 256) else p for p in parts
    ],
    "elements 1280 to 1441 of a arrived as torch.float32, and 1440 of torch.float32 were announced": lambda parts: [
        dataclasses.replace(p, count=161) if (p.name, p.first) == ("a", 1280) else p for p in parts
    ],
    "a part of a weight arrived that was not announced: c": lambda parts: [
        dataclasses.replace(p, name="c") if p.name == "b" else p for p in parts
    ],
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_part_that_is_missing_doubled_or_beside_its_place_is_named(
    tmp_path: Path, message: str
) -> None:
    both, weights = started(tmp_path, verify="off")
    with altered(CHANGES[message]), pytest.raises(RemoteError, match=message):  # type: ignore[attr-defined]
        both.sync(2)
    both.sync(3)
    assert_holds(both.worker.model, weights)
    both.manager.close()


def test_weights_come_whole_again_to_a_worker_that_has_forgotten_its_record(tmp_path: Path) -> None:
    both, weights = started(tmp_path)
    both.sync(2)
    both.worker.hotbunk_recording = None
    for version, staging in ((3, 2 * 6144), (4, 2 * BUCKET)):
        weights["a"] += 1
        both.sync(version)
        assert both.manager.report.staging_bytes == staging
        assert_holds(both.worker.model, weights)
    assert opened_and_closed(both) == (4, 3)
    both.manager.close()


@pytest.mark.parametrize(("name", "start"), [("a", 0), ("b", 3072)])
def test_a_wrong_byte_in_a_part_is_found_and_named(tmp_path: Path, name: str, start: int) -> None:
    both, _ = started(tmp_path)
    source = both.manager._update.source
    gather = source.gather_part

    def flipped(what: str, where: int, slot: Tensor) -> None:
        gather(what, where, slot)
        if (what, where) == (name, start):
            slot[-1] ^= 128

    with mock.patch.object(source, "gather_part", flipped):
        with pytest.raises(RemoteError, match=f"does not hold what was sent: {name} differ"):
            both.sync(2)
    both.sync(3)
    both.manager.close()


def test_weights_sent_again_for_comparison_fit_into_staging(tmp_path: Path) -> None:
    """Weights that are sent again share buckets, although the full plan puts each into a bucket of its own."""
    weights = {
        name: torch.randn(count) for name, count in {"a": 384, "b": 512, "c": 256, "d": 512}.items()
    }
    model = Flat(weights)
    source = FsdpWeightSource(list(weights.items()), torch.float32)
    both = InProcess(source, model, tmp_path, bucket_bytes=5 * 512, replay=False)  # type: ignore[arg-type]
    assert [len(bucket.slots) for bucket in BucketPlan(source.parameters(), 5 * 512).buckets] == [
        1,
        1,
        1,
        1,
    ]
    with mock.patch("sharding.verify.parameters_to_verify", lambda parameters, *_: parameters[::2]):
        both.sync(1)
    assert both.manager.report.verified == "full" and torch.equal(model.c, weights["c"])
    both.manager.close()


class Flat(nn.Module):
    """A model whose parameters are its weights, one to one."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.ranks = 1
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(weight)))
        self.norm = self.a

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).copy_(weight)
