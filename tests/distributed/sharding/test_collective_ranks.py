"""A sharded policy with an engine apart: four FSDP ranks gather, one broadcasts, both workers of the engine load."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

PROMPT = [20 + i for i in range(20)]


def check_ranks(model: str, folder: str) -> None:
    """Send weights by broadcast and by storage, with a refused update between, and compare answers after each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from generation.engine.engine import Leader
    from generation.engine.sampling import SamplingSettings
    from generation.engine.settings import EngineSettings
    from sharding import WORKER_EXTENSION
    from sharding.ranks import RemoteError, rank
    from sharding.remote.broadcast import CollectiveSender
    from sharding.remote.storage import StorageWriter
    from sharding.report import SyncSettings
    from sharding.send.source import FsdpWeightSource
    from tests.support.colocated import HfPolicy, stop
    from tests.support.nemo_worker import NemoWorker
    from tests.support.sliced import Episodes
    from trainer.distributed import destroy_process_group, init_process_group
    from trainer.policy.hf_format import checkpoint_views, parameter_names

    def start_engine() -> Leader:
        two = {
            "tensor_parallel_size": 2,
            "cpu_cores": (0, 1),
            "worker_extension": WORKER_EXTENSION,
            "keyed_noise": True,
        }
        settings = EngineSettings(model, 128, kv_cache_bytes=16 << 20, plain_cpu_weights=True, **two)  # type: ignore
        return Leader.start(NemoWorker(settings), 270)

    init_process_group(280, "cpu")
    leader = start_engine() if rank() == 0 else None
    plain, sharded = HfPolicy(model), HfPolicy(model)
    mesh = init_device_mesh("cpu", (4,))
    for layer in sharded.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded.model, mesh=mesh)

    layout = lambda name, shape: checkpoint_views(plain.model, name, shape)  # noqa: E731

    def randomise(seed: int) -> None:
        """Give the same new values to the whole model and to this rank's shards."""
        plain.randomise(seed)
        state = dict(plain.model.named_parameters())
        with torch.no_grad():
            for name, parameter in sharded.model.named_parameters():
                rows = state[name].chunk(4)
                local = parameter.to_local()
                local.copy_(rows[rank()] if len(rows) > rank() else local)

    def call(method: str, *arguments: Any) -> list[Future[Any]]:
        if leader is None:
            return []
        return [leader.thread.submit(getattr(leader.engine, method)(*arguments))]

    def check() -> None:
        if leader is None:
            return
        engine, sampling, place = (
            leader.engine,
            SamplingSettings(max_tokens=16),
            {"seed": 1, "policy_version": plain.version},
        )
        sampled = leader.thread.run(engine.complete(PROMPT, sampling, **place), 120, "a completion")
        with Episodes(
            leader, 5, [lambda gate: engine.complete(PROMPT, sampling, **place, turnstile=gate)]
        ) as episodes:
            (cut,) = episodes.results(plain.version)  # the same tokens must come slice by slice
        assert (cut.token_ids, cut.finish_reason) == (sampled.token_ids, sampled.finish_reason)
        assert max(abs(a - b) for a, b in zip(cut.logprobs, sampled.logprobs, strict=True)) < 1e-4
        expected = plain.logprobs(PROMPT + sampled.token_ids)[len(PROMPT) - 1 :]
        assert max(abs(a - b) for a, b in zip(expected, sampled.logprobs, strict=True)) < 1e-4

    source = FsdpWeightSource(list(parameter_names(sharded.model).items()), torch.float32, layout)
    with CollectiveSender(
        source, torch.device("cpu"), SyncSettings("full", 1 << 16, 60), workers=2
    ) as sender:
        assert sender.port > 0
        sender.connect(
            call("init_collective_async", 0, sender.ip, sender.port, sender.world_size, 1, 60.0)
        )
        for seed in (1, 2):
            randomise(seed)
            assert (
                sender.send(plain.version, call("update_weights_from_collective_async")).verified
                == "full"
            )
            check()
        for promise in call("prepare_refit_info_async", {"model.other": ([1], "float32")}):
            promise.result(60)
        refused = call("update_weights_from_collective_async")
        with pytest.raises(RemoteError, match=r"weights rank 1 failed: .*model\.other is missing"):
            sender.send(9, refused)  # raised on all ranks
        for answer in refused:
            with pytest.raises(RuntimeError, match=r"worker 0 on cpu:0 .*worker 1 on cpu:1 "):
                answer.result(60)
        for promise in call("prepare_refit_info_async", sender.refit_info()):
            promise.result(60)
        randomise(3)
        # No old answer is left in a queue
        sender.send(plain.version, call("update_weights_from_collective_async"))
        check()
    alone = FsdpWeightSource(list(parameter_names(plain.model).items()), torch.float32, layout)
    for weights in (source, alone):  # as four ranks and as a single rank store them
        randomise(plain.version + 4)
        StorageWriter(Path(folder), weights, bucket_bytes=1 << 16).write(plain.version)
        for load in call("load_weights_from_storage_async", folder):
            load.result(60)
        check()
    if leader is not None:
        stop(leader)
    destroy_process_group()


@pytest.mark.timeout(560)
def test_sharded_ranks_serve_a_tensor_parallel_engine_apart(tiny_qwen2: Path, tmp_path: Path) -> None:
    run_ranks(check_ranks, nproc=4, timeout=500, arguments=[str(tiny_qwen2), str(tmp_path / "weights")])
