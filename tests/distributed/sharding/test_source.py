"""Real ranks gather shards into place: uneven rows, fewer rows than ranks, both dtypes, other placements."""

import torch

from tests.support.launch import run_ranks


def check_gather() -> None:
    """Compare gathered weights with the whole ones, for every kind of placement."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from sharding.ranks import rank, world_size
    from sharding.send.source import FsdpWeightSource
    from tests.support.gathering import sent, sent_in_parts
    from trainer.distributed import destroy_process_group, init_process_group

    init_process_group(60, "cpu")
    mesh = init_device_mesh("cpu", (world_size(),))
    generator = torch.Generator().manual_seed(0)
    weights = {
        str(shape): torch.randn(shape, generator=generator)
        for shape in [(257, 8), (6, 5), (2, 3), (1,), (9,), (4, 2, 3)]
    }
    placements = [Shard(0), Shard(0), Shard(0), Shard(0), Replicate(), Shard(1)]
    tensors = {
        n: distribute_tensor(t, mesh, [p]) for (n, t), p in zip(weights.items(), placements, strict=True)
    }
    for dtype in (torch.float32, torch.bfloat16):
        source = FsdpWeightSource(list(tensors.items()), dtype)
        for got in (sent(source), sent_in_parts(source, 1 << 12), sent_in_parts(source, 1 << 11)):
            for name, weight in weights.items():
                assert torch.equal(got[name], weight.to(dtype)), (rank(), name)
    destroy_process_group()


def test_three_ranks_gather_every_parameter_into_its_place() -> None:
    run_ranks(check_gather, nproc=3, timeout=90)
