"""Every way of sending weights, under one manager: two ranks, each with an engine of its own."""

import tempfile
from pathlib import Path

import pytest

from tests.support.launch import run_ranks

WAYS = ("staged", "storage", f"{Path(__file__).with_name('way_in_messages.py')}:InMessages")


def check_ways(shared: str) -> None:
    """Sharded weights reach both engines by every way; failures are named, and the next update repairs them."""
    from types import SimpleNamespace

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from sharding.ranks import RemoteError, rank
    from sharding.send.source import FsdpWeightSource
    from sharding.wire.channel import SyncError
    from sharding.worker import extension
    from tests.support.in_process import InProcess, SmallModel, small_weights
    from trainer.build import sync_way
    from trainer.distributed import destroy_process_group, init_process_group

    init_process_group(60, "cpu")
    extension._PLAIN_ON_CPU = True
    mesh = init_device_mesh("cpu", (2,))
    policy = SimpleNamespace(device=torch.device("cpu"))

    def started(way: str, weights: dict[str, torch.Tensor]) -> InProcess:
        tensors = {name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in weights.items()}
        source = FsdpWeightSource(list(tensors.items()), torch.float32)
        sync, run = SimpleNamespace(way=way, timeout_s=20), SimpleNamespace(folder=Path(shared) / "run")
        chosen = sync_way(SimpleNamespace(sync=sync, run=run), policy, source)  # type: ignore[arg-type]
        both = InProcess(source, SmallModel(), Path(tempfile.mkdtemp()), way=chosen, bucket_bytes=1024)
        both.tensors = tensors  # type: ignore[attr-defined]
        return both

    def sync(both: InProcess, version: int) -> None:
        """Train, send, and compare with a model that has loaded the weights by itself."""
        weights = small_weights(version)
        for name, tensor in both.tensors.items():  # type: ignore[attr-defined]
            tensor.copy_(distribute_tensor(weights[name], mesh, [Shard(0)]))
        both.sync(version)
        fresh = SmallModel()
        fresh.load_weights(weights.items())
        for name, parameter in fresh.named_parameters():
            assert torch.equal(both.worker.model.get_parameter(name), parameter), (name, version)

    for way in WAYS:
        both = started(way, small_weights(0))
        reports = []
        for version in (1, 2, 3):
            sync(both, version)
            report = both.manager.report
            reports.append((report.verified, report.unreplayable, report.nbytes >= 4 * 179))
        assert reports == [("full", {"scaled": "its loader computes with it"}, True)] * 3, reports

        reader = both.worker.hotbunk_rank._buckets  # type: ignore[union-attr]
        take, taken = reader.bucket, []

        def torn(message: dict, take: object = take, taken: list = taken) -> torch.Tensor:
            taken.append(message)
            if rank() == 1 and len(taken) == 2:
                raise SyncError("the carrier is torn")
            return take(message)  # type: ignore[operator]

        reader.bucket = torn
        with pytest.raises(
            RemoteError, match="rank 1: SyncError: the worker on cpu:0 failed: SyncError: .* is torn"
        ):
            both.sync(4)
        reader.bucket = take
        sync(both, 5)

        send, sent = both.manager._transport.send, []

        def broken(*arguments: object, send: object = send, sent: list = sent) -> dict:
            sent.append(arguments)
            place: dict = send(*arguments)  # type: ignore[operator]
            if rank() == 0 and len(sent) == 2:
                raise OSError("no way out")
            return place

        both.manager._transport.send = broken  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="rank 0: OSError: no way out"):
            both.sync(6)
        both.manager._transport.send = send  # type: ignore[method-assign]
        sync(both, 7)
        if rank() == 1:
            # A new worker: weights come whole, and its loaders are recorded again
            both.die(SmallModel())
        both.manager.restart(lambda: None)
        for version in (8, 9):
            sync(both, version)
            assert both.manager.report.verified == "full"
        both.manager.close()

    from sharding.worker.weight_folder import StorageCarrier

    carrier = StorageCarrier(f"{shared}/run/weights", torch.device("cpu"), 5.0, verify=False)
    assert carrier.next()["version"] == 9, "any engine that has the folder can load the run's weights"
    carrier.leave({})
    destroy_process_group()


def test_two_engines_get_the_policys_weights_also_when_one_is_restarted(
    tmp_path: Path,
) -> None:
    run_ranks(check_ways, nproc=2, timeout=180, arguments=[str(tmp_path)])
