"""Weights that a worker reads out of the trainer's own memory: what arrives, what is found out, what is left mapped."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sharding.ranks import RemoteError
from sharding.send.source import FsdpWeightSource, LowRank, MergingWeightSource
from sharding.transports.pull import Pull
from sharding.transports.staged import Staged
from sharding.wire import low_rank
from sharding.wire.channel import SyncError
from sharding.worker import extension, recording
from sharding.worker.shards import MappedShards
from tests.support.in_process import InProcess, SmallModel, small_weights

CPU = torch.device("cpu")
BUCKETS = 2 * 512  # bytes of both buffers for the one weight whose loader computes with it


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)


class Pulled(InProcess):
    """Weights of one rank after the first sync, which records."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        ranks: int = 1,
        policy_dtype: torch.dtype = torch.float32,
        adapted: tuple[str, ...] = (),
    ) -> None:
        """`adapted`: the weights with an adapter."""
        self.weights = {name: weight.to(policy_dtype) for name, weight in small_weights(0).items()}
        self.adapters = {
            name: LowRank(
                torch.randn(2, self.weights[name].shape[1]), torch.randn(len(self.weights[name]), 2), 0.5
            )
            for name in adapted
        }
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        source = MergingWeightSource(list(self.weights.items()), self.adapters, dtype)
        factors = (factor for a, b, _ in self.adapters.values() for factor in (a, b))
        self.way = Pull(CPU, source, [*self.weights.values(), *factors], [self.optimizer])
        super().__init__(source, SmallModel(rank, ranks, dtype), folder, way=self.way)
        self.sync(1)
        self.shards = self.worker.hotbunk_rank.shards  # type: ignore[union-attr]

    def train_and_sync(self, version: int) -> None:
        """Change the weights, sync, and return a model that has loaded them directly, to compare with."""
        for name, weight in small_weights(version).items():
            self.weights[name].copy_(weight)
        for a, b, _ in self.adapters.values():
            a.normal_(), b.normal_()
        self.sync(version)
        model = self.worker.model
        fresh = SmallModel(model.rank, model.ranks, model.norm.dtype)
        fresh.load_weights((name, self.merged(name).to(model.norm.dtype)) for name in self.weights)
        for name, parameter in fresh.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name

    def merged(self, name: str) -> torch.Tensor:
        """Return a weight with its adapter, if it has one, computed row by row."""
        weight = self.weights[name]
        if name not in self.adapters:
            return weight
        a, b, scale = self.adapters[name]
        return torch.stack(
            [row.float() + scale * (left[None] @ a)[0] for row, left in zip(weight, b, strict=True)]
        )


@pytest.fixture
def pulled(tmp_path: Path) -> Iterator[Pulled]:
    both = Pulled(tmp_path)
    both.train_and_sync(2)
    yield both
    both.manager.close()


def mapped() -> int:
    """Count this process's mappings of shards, including the trainer's."""
    return Path("/proc/self/maps").read_text().count("hotbunk-shards")


DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("policy_dtype", "dtype"), DTYPES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_worker_reads_what_it_needs_and_only_computed_weights_are_staged(
    tmp_path: Path, policy_dtype: torch.dtype, dtype: torch.dtype, rank: int, ranks: int
) -> None:
    both = Pulled(tmp_path, dtype, rank, ranks, policy_dtype)
    first = both.manager.report
    assert first.staging_bytes > BUCKETS and first.unreplayable == {
        "scaled": "its loader computes with it"
    }
    for version in (2, 3):
        both.train_and_sync(version)
        report = both.manager.report
        assert (report.verified, report.staging_bytes) == ("full", BUCKETS)
    assert mapped() == 2
    both.manager.close()


@pytest.mark.parametrize(("policy_dtype", "dtype"), DTYPES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_worker_adds_the_adapters_of_what_it_reads_and_nothing_more_is_staged(
    tmp_path: Path,
    policy_dtype: torch.dtype,
    dtype: torch.dtype,
    rank: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_rank, "BLOCK", 1)  # a row at a time
    both = Pulled(tmp_path, dtype, rank, ranks, policy_dtype, adapted=("a", "columns"))
    for version in (2, 3):
        both.train_and_sync(version)
        report = both.manager.report
        assert (report.verified, report.staging_bytes) == ("full", BUCKETS)
    both.manager.close()


@pytest.mark.parametrize("factor", [0, 1])
def test_a_wrong_byte_in_what_is_read_of_a_factor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    both = Pulled(tmp_path, adapted=("columns",))
    both.train_and_sync(2)
    read = MappedShards._whole

    def spoiled(self: MappedShards, shape: list[int], parts: list) -> torch.Tensor:
        tensor = read(self, shape, parts)
        if shape[factor] == 2:
            tensor.view(torch.uint8)[0, 1] ^= 4
        return tensor

    with (
        monkeypatch.context() as patch,
        pytest.raises(RemoteError, match="not hold what was sent: columns differ"),
    ):
        patch.setattr(MappedShards, "_whole", spoiled)
        both.sync(3)
    both.train_and_sync(4)
    both.manager.close()


def test_a_factor_of_which_a_part_is_missing_is_not_read(tmp_path: Path) -> None:
    both = Pulled(tmp_path, adapted=("columns",))
    [[_, parts]] = [factor for _, _, *factors in both.way._added.values() for factor in factors[:1]]
    both.train_and_sync(2)
    parts[0][3] -= 1
    with pytest.raises(RemoteError, match=r"ranks hold 9 elements of a factor of shape \[5, 2\]"):
        both.sync(3)
    parts[0][3] += 1
    both.train_and_sync(4)
    both.manager.close()


def test_a_shard_that_has_other_memory_is_named_before_anything_is_read(pulled: Pulled) -> None:
    before, version = pulled.weights["columns"].data, pulled.worker.model.columns.clone()
    pulled.weights["columns"].data = before.clone()
    with pytest.raises(
        RemoteError, match="columns left the memory that workers map: set sync.way to staged"
    ):
        pulled.sync(3)
    assert torch.equal(pulled.worker.model.columns, version)
    pulled.weights["columns"].data = before
    pulled.train_and_sync(4)


@contextmanager
def while_reading(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> Iterator[None]:
    """Call a function after the worker has copied what it pulls and before it checks that it was permitted to."""
    copy = recording._copy_all

    def copy_and_act(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copy(pairs)
        if len(pairs) > 1:
            action()

    with monkeypatch.context() as patched:
        patched.setattr(recording, "_copy_all", copy_and_act)
        yield


class Biased(SmallModel):
    """A model in bfloat16 that keeps one parameter in float32, as mixtures keep the biases that decide routes."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.bfloat16)
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "bias":
                self.bias.data.copy_(weight)
            else:
                super().load_weights([(name, weight)])


@pytest.mark.parametrize("kind", ["staged", "pull"])
def test_a_bias_that_decides_routes_arrives_in_float32(tmp_path: Path, kind: str) -> None:
    weights = small_weights(0) | {"bias": torch.zeros(4)}
    source = FsdpWeightSource(list(weights.items()), torch.bfloat16, uncast=["bias"])
    way = Pull(CPU, source, weights.values()) if kind == "pull" else Staged(CPU)
    both = InProcess(source, Biased(), tmp_path, way=way)
    for version in (1, 2, 3):
        weights["bias"].normal_()
        both.sync(version)
        assert torch.equal(both.worker.model.bias, weights["bias"])
        assert both.worker.model.norm.dtype == torch.bfloat16
    assert both.manager.report.unreplayable == {"scaled": "its loader computes with it"}
    if kind == "pull":
        assert both.manager.report.staging_bytes == BUCKETS, "the bias is read from the trainer's memory"
    both.manager.close()


def test_an_optimizer_step_while_shards_are_read_is_detected(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = "what this worker maps of rank 0's shards changed while they were read"
    with while_reading(monkeypatch, pulled.optimizer.step), pytest.raises(RemoteError, match=complaint):
        pulled.sync(3)
    assert mapped() == 1, "the worker has let go of the shards"
    pulled.train_and_sync(4)
    assert mapped() == 2


def test_a_wrong_byte_is_named(pulled: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil() -> None:
        pulled.worker.model.columns.data.view(torch.uint8)[3, 17] ^= 4

    with (
        while_reading(monkeypatch, spoil),
        pytest.raises(RemoteError, match="not hold what was sent: columns differ"),
    ):
        pulled.sync(3)
    pulled.train_and_sync(4)


def test_a_worker_that_maps_other_memory_reads_nothing(
    pulled: Pulled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    other = Pulled(tmp_path / "other")
    before = pulled.worker.model.columns.clone()
    monkeypatch.setattr(pulled.way.export, "_file", other.way.export._file)
    pulled.way.connect(None)
    with pytest.raises(RemoteError, match="rank 0's shards is not the memory that was announced"):
        pulled.sync(3)
    assert torch.equal(pulled.worker.model.columns, before)
    monkeypatch.undo()
    monkeypatch.setattr(extension, "_PLAIN_ON_CPU", True)
    pulled.train_and_sync(4)
    other.manager.close()


def test_shards_whose_memory_was_given_back_are_named(tmp_path: Path) -> None:
    both = Pulled(tmp_path)
    os.close(both.way.export._file._fd)
    with pytest.raises(RemoteError, match="rank 0's shards are not there to be mapped any more"):
        both.sync(2)
    assert mapped() == 1, "the rank's own"
    both.manager.close()


def test_memory_behind_the_end_of_a_shard_is_not_read(pulled: Pulled) -> None:
    place = pulled.way._parts["columns"][0]
    place[-1] += 64
    with pytest.raises(
        RemoteError, match="elements 0 to 40 of columns lie behind the end of a rank's shard"
    ):
        pulled.sync(3)
    place[-1] -= 64
    pulled.train_and_sync(4)


def test_memory_that_the_policy_keeps_to_itself_is_refused_by_name() -> None:
    weights = small_weights(0)
    source = FsdpWeightSource(list(weights.items()), torch.float32)
    with pytest.raises(SyncError, match="does not say what shares the memory of columns"):
        Pull(CPU, source, [weight for name, weight in weights.items() if name != "columns"])


def test_later_syncs_map_nothing_anew(pulled: Pulled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharding.worker.shards.open_memory", None)
    for version in range(3, 13):
        pulled.train_and_sync(version)
        assert mapped() == 2
