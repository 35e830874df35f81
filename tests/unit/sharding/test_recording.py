"""Recording what loaders do, against loaders written here: fused, sliced, padded, and some that cannot be replayed."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sharding.wire.manifest import View
from sharding.worker.recording import (
    LoadWatcher,
    Recording,
    _covers_once,
    parameter_storages,
    storage_key,
)


class Fused(nn.Module):
    """Parameters as an engine has them: q and k fused, a padded vocabulary, one rank's columns, something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((6, 4), 9.0))
        self.vocabulary = nn.Parameter(torch.full((8, 4), 9.0))
        self.columns = nn.Parameter(torch.full((4, 2), 9.0))
        self.turned = nn.Parameter(torch.full((4, 3), 9.0))
        self.scaled = nn.Parameter(torch.full((3,), 9.0))
        self.narrow = nn.Parameter(torch.full((3,), 9.0, dtype=torch.bfloat16))

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "q":
                self.qk.data.narrow(0, 0, 4).copy_(weight)
            elif name == "k":
                self.qk.data[4:].copy_(weight)
            elif name == "vocabulary":
                self.vocabulary.data[:5].copy_(weight)
                self.vocabulary.data[5:].fill_(0)
            elif name == "columns":
                self.columns.data.copy_(weight.narrow(1, 2, 2))
            elif name == "turned":
                self.turned.data.copy_(weight.t())
            elif name == "scaled":
                self.scaled.data.copy_(weight * 2)
            elif name == "narrow":
                self.narrow.data.copy_(weight)


MATRICES = {"q": (4, 4), "k": (2, 4), "vocabulary": (5, 4), "columns": (4, 4), "turned": (3, 4)}
SHAPES: dict[str, tuple[int, ...]] = MATRICES | {"scaled": (3,), "narrow": (3,)}
MANIFEST = {name: [list(shape), "float32"] for name, shape in SHAPES.items()}


def weights(seed: int, start: int = 0) -> list[tuple[str, Tensor]]:
    """Return all weights, at changing places of one buffer."""
    buffer = torch.randn(
        start + sum(map(math.prod, SHAPES.values())), generator=torch.Generator().manual_seed(seed)
    )
    tensors, end = [], start
    for name, shape in SHAPES.items():
        tensors.append((name, buffer[end : end + math.prod(shape)].view(shape)))
        end += math.prod(shape)
    return tensors


def record(model: nn.Module, sent: list[tuple[str, Tensor]], complete: bool = False) -> Recording:
    watcher = LoadWatcher()
    watcher.recording = recording = Recording(MANIFEST, parameter_storages(model))
    watcher.expect(sent)
    with watcher:
        model.load_weights(sent)
    recording.check(complete)
    return recording


def test_a_replay_leaves_the_same_weights_as_the_loaders() -> None:
    """The weights are replayed from other memory into parameters that were overwritten, as after a sleep."""
    model, twin = Fused(), Fused()
    recording = record(model, weights(0))
    assert set(recording.unreplayable) == {"scaled", "narrow"}
    assert (
        "computes" in recording.unreplayable["scaled"] and "bfloat16" in recording.unreplayable["narrow"]
    )
    sent = weights(1, start=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    recording.replay([pair for pair in sent if recording.replayable(pair[0])])
    recording.refill()
    twin.load_weights(sent)
    for name in ("qk", "vocabulary", "columns", "turned"):
        assert torch.equal(getattr(model, name), getattr(twin, name)), name


def test_a_weight_that_is_not_read_whole_is_left_to_its_loader_unless_ranks_share_it() -> None:
    assert "columns" in record(Fused(), weights(0), complete=True).unreplayable
    assert "columns" not in record(Fused(), weights(0), complete=False).unreplayable


class Overlapping(nn.Module):
    """A loader that writes one row twice, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4, 2))

    @torch.no_grad()
    def load_weights(self, sent: list[tuple[str, Tensor]]) -> None:
        self.both.data[:2].copy_(sent[0][1])
        self.both.data[1:3].copy_(sent[1][1])


def test_parameters_that_are_not_written_once_are_left_to_their_loaders() -> None:
    sent = [("a", torch.ones(2, 2)), ("b", torch.ones(2, 2))]
    assert record(Overlapping(), sent).unreplayable.keys() == {"a", "b"}


def test_a_recording_fits_only_its_own_memory_and_weights() -> None:
    model = Fused()
    recording = record(model, weights(0))
    assert recording.fits(model, MANIFEST)
    for other in ({"more": [[1], "float32"]}, {"q": [[2, 8], "float32"]}, {"q": [[4, 4], "bfloat16"]}):
        assert not recording.fits(model, MANIFEST | other)
    model.qk = nn.Parameter(torch.zeros(6, 4))
    assert not recording.fits(model, MANIFEST)
    assert not Recording({}, parameter_storages(model)).fits(model, {}), "nothing was recorded"


def test_a_recording_keeps_no_staging_memory_alive() -> None:
    """A recording has no reference to memory that was mapped for an update: it can be unmapped afterwards."""
    model, sent = Fused(), weights(0)
    key = storage_key(sent[0][1])
    recording = record(model, sent)
    held = {storage_key(t) for name in recording.copies for t in recording.targets(name)}
    assert key not in held and held <= recording.parameters


@pytest.mark.parametrize("wrong", [1, -1, 4])
def test_a_recording_with_a_wrong_offset_differs_from_the_loaders(wrong: int) -> None:
    """A comparison with the loaders, which know nothing of the recording, finds the wrong offset, as a verified sync
    does.
    """
    import dataclasses

    model = Fused()
    recording = record(model, weights(0))
    (copy,) = recording.copies["k"]
    recording.copies["k"] = [dataclasses.replace(copy, offset=copy.offset + wrong)]
    sent = weights(1)
    recording.replay([pair for pair in sent if recording.replayable(pair[0])])
    watcher = LoadWatcher()
    watcher.comparing = True
    watcher.expect(sent)
    with watcher:
        model.load_weights(sent)
    assert watcher.different == {"k", "scaled", "narrow"}  # the latter two were not sent a second time


def test_memory_that_no_longer_holds_a_weight_is_not_taken_for_it() -> None:
    """Copy of weights are freed once they are loaded, and a later loader's results may have the same address."""
    watcher = LoadWatcher()
    memory = torch.zeros(8)
    # A storage of its own, in the same memory
    weight = torch.frombuffer(memory.numpy(), dtype=torch.float32)
    watcher.expect([("k", weight)])
    assert watcher.source_name(weight) == watcher.source_name(weight[2:]) == "k"
    assert watcher.source_name(memory) == "k"
    del weight
    assert watcher.source_name(memory) is None
    watcher.expect([("q", memory[:4])])
    assert [watcher.source_name(part) for part in (memory[:4], memory[4:])] == ["q", None]


VIEWS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=3),
    ),
    max_size=4,
)


@settings(max_examples=500, deadline=None)
@given(VIEWS, st.integers(1, 24))
def test_coverage_equals_a_count_of_elements(views: list, elements: int) -> None:
    """The coverage is compared with a loop over every index of every view."""
    flat: list[View] = [(o, tuple(n for n, _ in dims), tuple(s for _, s in dims)) for o, dims in views]
    seen = [
        offset + sum(i * s for i, s in zip(index, stride, strict=True))
        for offset, shape, stride in flat
        for index in itertools.product(*map(range, shape))
    ]
    assert _covers_once(flat, elements) == (sorted(seen) == list(range(elements)))


def test_the_coverage_of_cut_tensors_is_exact() -> None:
    tensor = torch.arange(24).view(4, 6)
    for parts in (
        [tensor[:, :2], tensor[:, 2:]],
        [tensor[:1], tensor[1:]],
        [tensor.t()],
        [tensor[:2, 3:], tensor[:2, :3], tensor[2:]],
    ):
        views = [(int(p.storage_offset()), tuple(p.shape), p.stride()) for p in parts]
        assert (
            _covers_once(views, 24)
            and not _covers_once(views[1:], 24)
            and not _covers_once([*views, views[0]], 24)
        )
