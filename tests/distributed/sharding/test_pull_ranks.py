"""Workers read the shards of two ranks: policies train in memory that others map, and failures are named."""

import json
from pathlib import Path

import pytest

from tests.support import policy_checks as checks
from tests.support.launch import run_ranks
from tests.support.rank_checks import run_checks

NAMES = (
    "fsdp float32",
    "fsdp bfloat16",
    "zero3 float32",
    "zero3 bfloat16",
    "uneven",
    "adapters",
    "writer",
    "moved",
)


def check_trains_alike(folder: Path, backend: str, dtype: str) -> None:
    """Update and score are, bit for bit, those of a policy whose shards were never moved."""
    import torch

    from sharding.transports.pull import Pull
    from tests.support.deepspeed_checks import zero_policy
    from trainer.build import weight_source

    def make() -> object:
        settings = {"dtype": dtype, "max_grad_norm": 0.3, "weight_decay": 0.1}
        if backend == "zero3":
            return zero_policy(folder, 3, **settings)
        return checks.make_policy(folder, **settings)

    exported, plain = make(), make()
    source = weight_source(exported, torch.bfloat16)
    pull = Pull(checks.CPU, source, exported.shard_tensors(), [exported.optimizer])
    batches = checks.own_batches(checks.make_samples(), 40)
    for _ in range(3):
        results = [
            p.update(batches, checks.make_loss(batches), checks.TEMPERATURE) for p in (exported, plain)
        ]
        assert results[0] == results[1]
        assert not pull.export.moved()
        scores = [[o.logprobs for o in p.score(batches, checks.TEMPERATURE)] for p in (exported, plain)]
        assert all(torch.equal(first, second) for first, second in zip(*scores, strict=True))
        shards, expected = source.shards(), weight_source(plain, torch.bfloat16).shards()
        assert shards.keys() == expected.keys() and all(
            torch.equal(shards[name], expected[name]) for name in shards
        )
        assert not pull.export.moved()
    pull.export._file.close()


def two_ranks(models: str, results: str) -> None:
    """Run the checks of NAMES on two ranks, and write the results to the file `results`."""
    import tempfile
    from types import SimpleNamespace

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from sharding.ranks import RemoteError, rank
    from sharding.send.source import LowRank, MergingWeightSource
    from sharding.worker import extension, recording
    from tests.support.in_process import InProcess, SmallModel, small_weights
    from trainer.build import sync_way
    from trainer.distributed import init_process_group

    init_process_group(60, "cpu")
    extension._PLAIN_ON_CPU = True
    mesh = init_device_mesh("cpu", (2,))

    def halved(weights: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        return {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in weights.items()}

    def factors(seed: int) -> dict[str, torch.Tensor]:
        """Factors A and B of two weights, of rank three."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {"A of a": (3, 6), "B of a": (12, 3), "A of columns": (3, 8), "B of columns": (5, 3)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def started(ranks: int, dtype: torch.dtype, *adapted: str) -> InProcess:
        """Start engines of `ranks` workers each; weights of five or seven rows cannot be halved.

        `adapted` names the weights with adapters.
        """
        weights = halved(small_weights(0))
        added = halved({name: factor for name, factor in factors(0).items() if name[5:] in adapted})
        tensors = weights | added
        policy = SimpleNamespace(
            device=checks.CPU,
            model=torch.nn.Module(),
            named_parameters=tensors.items,
            shard_tensors=lambda: [tensor._local_tensor for tensor in tensors.values()],
            optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]),
        )
        adapters = {name: LowRank(added[f"A of {name}"], added[f"B of {name}"], 0.5) for name in adapted}
        source = MergingWeightSource(list(weights.items()), adapters, dtype)
        sync = SimpleNamespace(way="pull", timeout_s=20)
        run = SimpleNamespace(folder=Path(results).parent)
        way = sync_way(SimpleNamespace(sync=sync, run=run), policy, source)  # type: ignore[arg-type]
        model = SmallModel(rank() % ranks, ranks, dtype)
        both = InProcess(source, model, Path(tempfile.mkdtemp()), way=way)
        both.tensors, both.optimizer = tensors, policy.optimizer  # type: ignore[attr-defined]
        both.sync(1)
        return both

    def train_and_sync(both: InProcess, version: int) -> None:
        weights, added, model = small_weights(version), factors(version), both.worker.model
        for name, tensor in both.tensors.items():  # type: ignore[attr-defined]
            tensor.copy_(distribute_tensor((weights | added)[name], mesh, [Shard(0)]))
        both.sync(version)
        for name in (name for name in weights if f"A of {name}" in both.tensors):  # type: ignore[attr-defined]
            weights[name] += 0.5 * (added[f"B of {name}"] @ added[f"A of {name}"])
        fresh = SmallModel(model.rank, model.ranks, model.norm.dtype)
        fresh.load_weights((name, weight.to(model.norm.dtype)) for name, weight in weights.items())
        for name, parameter in fresh.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), (name, version)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("hotbunk-shards")

    def uneven() -> None:
        before = mapped()
        for ranks, dtype in ((1, torch.float32), (2, torch.bfloat16)):
            both = started(ranks, dtype)
            for version in (2, 3):
                train_and_sync(both, version)
                assert both.manager.report.staging_bytes == 2 * 512
            assert mapped() == before + 3, "mapped: this rank's shards, and both ranks' by its worker"
            del both.worker.hotbunk_rank.shards._memory[:]  # type: ignore[union-attr]
            both.manager.close()

    def adapters() -> None:
        """Rank 1 has the last of the three rows of each factor A."""
        for ranks, dtype in ((1, torch.float32), (2, torch.bfloat16)):
            both = started(ranks, dtype, "a", "columns")
            for version in (2, 3):
                train_and_sync(both, version)
                assert both.manager.report.staging_bytes == 2 * 512
            both.manager.close()

    def writer() -> None:
        """Rank 1's optimizer steps while its shards are being read."""
        both, copy = started(1, torch.float32), recording._copy_all

        def copy_and_step(pairs: list) -> None:
            copy(pairs)
            if len(pairs) > 1 and rank() == 1:
                both.optimizer.step()  # type: ignore[attr-defined]

        recording._copy_all = copy_and_step
        with pytest.raises(RemoteError, match="of rank 1's shards changed while they were read"):
            both.sync(2)
        recording._copy_all = copy
        train_and_sync(both, 3)
        both.manager.close()

    def moved() -> None:
        """A shard of rank 1 moves to other memory: all ranks raise, and rank 0's worker is released."""
        both = started(1, torch.float32)
        shard = both.tensors["columns"]._local_tensor  # type: ignore[attr-defined]
        if rank() == 1:
            memory, shard.data = shard.data, shard.data.clone()
        with pytest.raises(
            RemoteError, match="rank 1: SyncError: columns left the memory that workers map"
        ):
            both.sync(2)
        if rank() == 1:
            shard.data = memory
        train_and_sync(both, 3)
        both.manager.close()

    folder = checks.model_folder(Path(models))
    todo = {
        f"{backend} {dtype}": lambda backend=backend, dtype=dtype: check_trains_alike(
            folder, backend, dtype
        )
        for backend in ("fsdp", "zero3")
        for dtype in ("float32", "bfloat16")
    }
    todo |= {"uneven": uneven, "adapters": adapters, "writer": writer, "moved": moved}
    run_checks(todo, Path(results))


@pytest.fixture(scope="module")
def failures(models: Path) -> dict[str, str]:
    run_ranks(two_ranks, 2, timeout=240, arguments=[str(models), str(models / "pulled.json")])
    return json.loads((models / "pulled.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_shards_that_others_map_train_alike_and_failures_are_named(
    failures: dict[str, str], name: str
) -> None:
    assert failures[name] == ""


def test_one_rank_trains_alike_in_memory_that_others_map(one_rank: None, models: Path) -> None:
    check_trains_alike(checks.model_folder(models), "fsdp", "bfloat16")


def dying() -> None:
    """Rank 1 ends while its shards are read; rank 0's error names it, and its worker unmaps the memory."""
    import os
    import tempfile

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from sharding.ranks import RemoteError, rank, share_pids
    from sharding.send.source import FsdpWeightSource
    from sharding.transports.pull import Pull
    from sharding.worker import extension, recording
    from tests.support.in_process import InProcess, SmallModel, small_weights
    from tests.support.launch import leave
    from trainer.distributed import init_process_group

    init_process_group(60, "cpu")
    share_pids()
    extension._PLAIN_ON_CPU = True
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in small_weights(0).items()
    }
    source = FsdpWeightSource(list(tensors.items()), torch.float32)
    way = Pull(checks.CPU, source, [tensor._local_tensor for tensor in tensors.values()])
    both = InProcess(source, SmallModel(), Path(tempfile.mkdtemp()), way=way)
    both.sync(1)
    copy = recording._copy_all

    def copy_and_end(pairs: list) -> None:
        if len(pairs) > 1 and rank() == 1:
            os._exit(0)
        copy(pairs)

    recording._copy_all = copy_and_end
    with pytest.raises(RemoteError, match="lost contact with rank 1, whose process [0-9]+ has ended"):
        both.sync(2)
    assert Path("/proc/self/maps").read_text().count("hotbunk-shards") == 1, "only its own may stay"
    leave()


def test_a_rank_that_dies_while_it_is_read_is_named_and_unmapped() -> None:
    run_ranks(dying, nproc=2, timeout=90, lost=(1,))
