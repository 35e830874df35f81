"""Digests on two ranks: each rank holds one part of every weight, and its worker reads another part."""

import tempfile
from pathlib import Path

from tests.support.launch import run_ranks

COMPLAINT = "the worker on cpu:0 does not hold what was sent: columns differ"


def two_ranks() -> None:
    """Sync weights of uneven rows to engines of one and of two workers, until rank 1 sends a wrong byte."""
    import pytest
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from sharding.ranks import RemoteError, rank
    from sharding.send import source as sources
    from sharding.worker import extension
    from tests.support.in_process import InProcess, SmallModel, small_weights
    from trainer.distributed import destroy_process_group, init_process_group

    init_process_group(60, "cpu")
    extension._PLAIN_ON_CPU = True
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        name: distribute_tensor(weight, mesh, [Shard(0)]) for name, weight in small_weights(1).items()
    }

    class Faulty(sources.FsdpWeightSource):
        broken = False

        def _padded_shard(self, name: str, nbytes: int) -> torch.Tensor:
            shard = super()._padded_shard(name, nbytes).clone()
            if self.broken and rank() == 1 and name == "columns":
                shard[5] ^= 32
            return shard

    for verify, ranks, large in (("full", 2, 60), ("sample", 2, 0), ("full", 1, 1 << 20)):
        sources.LARGE_BYTES = large  # some weights are gathered alone, or all, or none
        source = Faulty(list(tensors.items()), torch.bfloat16)
        model = SmallModel(rank() % ranks, ranks, torch.bfloat16)
        both = InProcess(source, model, Path(tempfile.mkdtemp()), verify=verify)
        for version in (1, 2, 3):
            both.sync(version)
        assert torch.equal(
            model.columns, small_weights(1)["columns"].chunk(ranks, dim=1)[rank() % ranks].bfloat16()
        )
        source.broken = True
        with pytest.raises(RemoteError) as caught:
            for version in range(4, 100):
                both.sync(version)
        # The byte is in row 3, column 2: of two workers that share the columns only the first reads it.
        assert str(caught.value).count(COMPLAINT) == (1 if ranks == 2 else 2), caught.value
        source.broken = False
        both.sync(100)
        both.manager.close()
    destroy_process_group()


def test_a_wrong_byte_from_one_rank_is_found_by_the_digests() -> None:
    run_ranks(two_ranks, nproc=2, timeout=180)
