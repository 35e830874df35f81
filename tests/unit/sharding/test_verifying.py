"""A verified sync finds and names a wrong byte anywhere between the ranks' shards and the engine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sharding.ranks import RemoteError
from sharding.send.source import FsdpWeightSource
from sharding.transports.pull import Pull
from sharding.verify import parameters_to_verify
from sharding.wire.manifest import Piece, SourceParameter
from sharding.worker import extension, receiver
from sharding.worker.recording import Recording
from tests.support.gathering import assert_ranks_hold
from tests.support.in_process import InProcess, SmallModel, Worker, small_weights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)


class Trained(FsdpWeightSource):
    """A policy in one process."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.weights = small_weights(0)
        super().__init__(list(self.weights.items()), dtype)

    def train(self) -> None:
        for weight in self.weights.values():
            weight.add_(torch.randn(weight.shape))


def started(
    tmp_path: Path, rank: int = 0, ranks: int = 1, **settings: object
) -> tuple[InProcess, Trained]:
    """Return a sync pair after the first sync, which records."""
    source = Trained()
    both = InProcess(source, SmallModel(rank, ranks), tmp_path, **settings)
    both.sync(1)
    source.train()
    return both, source


def in_staging(both: InProcess, patch: pytest.MonkeyPatch) -> str:
    """Flips a bit in staging memory after the weights were gathered and before the worker reads them."""
    views_of = receiver.views_of

    def flipped(buffer: torch.Tensor, message: dict) -> list:
        tensors = views_of(buffer, message)
        if message["kind"] == "bucket":
            dict(tensors)["b"].view(torch.int32)[3, 2] ^= 1
        return tensors

    patch.setattr(receiver, "views_of", flipped)
    return "b"


def in_a_recorded_offset(both: InProcess, patch: pytest.MonkeyPatch) -> str:
    recording = both.worker.hotbunk_recording
    assert recording is not None
    (copy,) = recording.copies["a"]
    patch.setitem(recording.copies, "a", [dataclasses.replace(copy, offset=copy.offset + 1)])
    return "a"


def in_a_recorded_target(both: InProcess, patch: pytest.MonkeyPatch) -> str:
    recording = both.worker.hotbunk_recording
    assert recording is not None
    (copy,) = recording.copies["b"]
    a_row_above = both.worker.model.rows.data[-len(copy.target) - 1 : -1]
    patch.setitem(recording.copies, "b", [dataclasses.replace(copy, target=a_row_above)])
    return "a, b"


def in_a_parameter(both: InProcess, patch: pytest.MonkeyPatch) -> str:
    """Flips a bit in a parameter after everything was loaded."""

    def flipped(self: Recording) -> None:
        both.worker.model.norm.data.view(torch.int32)[6] ^= 1 << 30

    patch.setattr(Recording, "refill", flipped)
    return "norm"


def in_what_a_rank_contributes(both: InProcess, patch: pytest.MonkeyPatch) -> str:
    source = both.manager._update.source
    gather = source.gather_into

    def flipped(names: list[str], slots: list[torch.Tensor]) -> None:
        gather(names, slots)
        if "columns" in names:
            slots[names.index("columns")][17] ^= 128

    patch.setattr(source, "gather_into", flipped)
    return "columns"


FLIPS = [
    in_staging,
    in_a_recorded_offset,
    in_a_recorded_target,
    in_a_parameter,
    in_what_a_rank_contributes,
]


@pytest.mark.parametrize("flip", FLIPS)
def test_a_wrong_byte_is_found_and_named_and_the_next_sync_repairs_it(
    tmp_path: Path, flip: Callable[[InProcess, pytest.MonkeyPatch], str]
) -> None:
    both, source = started(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        name = flip(both, patch)
        with pytest.raises(
            RemoteError, match=f"worker on cpu:0 does not hold what was sent: {name} differ"
        ):
            both.sync(2)
    both.sync(3)
    assert torch.equal(both.worker.model.rows, torch.cat([source.weights["a"], source.weights["b"]]))
    both.manager.close()


@pytest.mark.parametrize("flip", [in_a_recorded_offset, in_what_a_rank_contributes])
def test_sampled_verification_finds_a_wrong_byte_in_the_end(
    tmp_path: Path, flip: Callable[[InProcess, pytest.MonkeyPatch], str]
) -> None:
    both, _ = started(tmp_path, verify="sample")
    with pytest.MonkeyPatch.context() as patch:
        name = flip(both, patch)
        with pytest.raises(RemoteError, match=f"does not hold what was sent: {name} differ"):
            for version in range(2, 60):
                both.sync(version)
    both.manager.close()


def test_a_recorded_update_sends_again_only_weights_that_loaders_compute(tmp_path: Path) -> None:
    both, _ = started(tmp_path)
    sent = {"a": 12 * 6, "b": 8 * 6, "columns": 5 * 8, "norm": 7, "scaled": 3}
    once = sum(4 * n + (-4 * n) % 512 for n in sent.values())
    assert both.manager.report.unreplayable == {"scaled": "its loader computes with it"}
    assert both.manager.report.nbytes == 2 * once
    both.sync(2)
    assert both.manager.report.nbytes == once + 512
    assert both.manager.report.verified == "full"
    both.manager.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flip", [None, in_staging, in_a_recorded_offset, in_a_recorded_target])
def test_a_tensor_parallel_worker_is_asked_for_its_part_of_a_weight(
    tmp_path: Path, rank: int, flip: Callable[[InProcess, pytest.MonkeyPatch], str] | None
) -> None:
    both, source = started(tmp_path, rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        if flip is None:
            both.sync(2)
            assert torch.equal(
                both.worker.model.columns, source.weights["columns"].chunk(2, dim=1)[rank]
            )
        elif (name := flip(both, patch)) == "b" and rank == 1:
            both.sync(2)  # row 3 of 8 is the other worker's
        else:
            with pytest.raises(RemoteError, match=f"{name} differ"):
                both.sync(2)
    both.manager.close()


def test_bfloat16_weights_of_float32_masters_are_verified(tmp_path: Path) -> None:
    source = Trained(torch.bfloat16)
    both = InProcess(source, SmallModel(dtype=torch.bfloat16), tmp_path)
    for version in (1, 2, 3):
        source.train()
        both.sync(version)
        assert torch.equal(both.worker.model.norm, source.weights["norm"].bfloat16())
    both.manager.close()


def test_weights_that_share_a_parameter_are_compared_at_their_places() -> None:
    fused = torch.randn(5, 4)
    source = FsdpWeightSource(
        [("ab", fused)], torch.float32, lambda *_: [("a", 0, (2, 4)), ("b", 8, (3, 4))]
    )
    assert_ranks_hold(source, {"a": fused[:2].clone(), "b": fused[2:].clone()})


class Leaving(SmallModel):
    """A loader that skips a weight silently, as vLLM's loaders do."""

    def __init__(self, left: str) -> None:
        super().__init__()
        self.left = left

    def load_weights(self, weights: Any) -> None:
        super().load_weights((name, weight) for name, weight in weights if name != self.left)


@pytest.mark.parametrize(
    ("left", "checkpoint", "error"),
    [
        ("last", {"last": (2, 3)}, ""),
        ("last", {"last": (3, 2)}, "sent but read by no part of the engine's model: last"),
        ("last", {"other": (2, 3)}, "sent but read by no part of the engine's model: last"),
        ("last", {}, "sent but read by no part of the engine's model: last"),
        (
            "norm",
            {"norm": (7,), "last": (2, 3)},
            "never sent, so the engine would keep old values: norm",
        ),
    ],
)
@pytest.mark.parametrize("pulls", [False, True])
def test_weights_that_an_engine_does_not_load_are_reported_as_left_out(
    tmp_path: Path, left: str, checkpoint: dict[str, tuple[int, ...]], error: str, pulls: bool
) -> None:
    weights = small_weights(0) | ({"last": torch.randn(2, 3)} if left == "last" else {})
    source = FsdpWeightSource(list(weights.items()), torch.float32)
    worker = Worker.of(Leaving(left))
    if checkpoint:
        worker.vllm_config.model_config.model = str(tmp_path)
        save_file(
            {name: torch.zeros(shape) for name, shape in checkpoint.items()},
            tmp_path / "model.safetensors",
        )
    both = InProcess(source, worker, tmp_path, Pull(CPU, source, weights.values()) if pulls else None)
    if error:
        with pytest.raises(RemoteError, match=error):
            both.sync(1)
        return
    for version in (1, 2, 3):
        for weight in weights.values():
            weight.add_(1)
        both.sync(version)
        assert both.manager.report.left_out == ["last"] and both.manager.report.verified == "full"
        assert torch.equal(worker.model.norm, weights["norm"])
    both.manager.close()


def test_samples_are_alike_everywhere_and_all_in_the_end() -> None:
    parameters = [SourceParameter(f"p{i}", 4, (Piece(f"p{i}", "float32", (1,), 0),)) for i in range(40)]
    drawn = [parameters_to_verify(parameters, "sample", version) for version in range(400)]
    assert drawn == [parameters_to_verify(list(parameters), "sample", version) for version in range(400)]
    assert {len(sample) for sample in drawn} == {2}
    assert {p.name for sample in drawn for p in sample} == {p.name for p in parameters}
    assert parameters_to_verify(parameters, "off", 1) == []
