"""The NCCL side of the collective path: policy on one GPU, engine on another.

It has run on the GPU in software (tests/softgpu), with Gloo as NCCL, and on no real ones yet.
"""

from pathlib import Path

import pytest
import torch

from generation.engine.sampling import SamplingSettings
from sharding.remote.broadcast import CollectiveSender
from sharding.report import SyncSettings
from sharding.send.source import FsdpWeightSource
from tests.support.colocated import HfPolicy, assert_as_close_as_bfloat16, start_engine, stop
from tests.support.nemo_worker import NemoWorker
from trainer.commands.tiny_model import make_tiny_model
from trainer.policy.hf_format import checkpoint_views, parameter_names

pytestmark = pytest.mark.gpu

PROMPT = [14, 50, 77, 120, 9]


def test_weights_reach_an_engine_on_another_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL joins no two processes on one GPU: needs two")
    folder = make_tiny_model(tmp_path / "model", hidden_size=512, heads=8, kv_heads=4, layers=8)
    cuda = {
        "device_indices": (1,),
        "kv_cache_bytes": 1 << 30,
        "gpu_memory_utilization": 0.1,
        "dtype": "bfloat16",
    }
    leader = start_engine(folder, kind=NemoWorker, **cuda)
    policy = HfPolicy(folder, "cuda:0", torch.bfloat16)
    layout = lambda name, shape: checkpoint_views(policy.model, name, shape)  # noqa: E731
    source = FsdpWeightSource(list(parameter_names(policy.model).items()), torch.bfloat16, layout)
    engine, submit = leader.engine, leader.thread.submit
    with CollectiveSender(
        source, policy.device, SyncSettings("full", 16 << 20, 60), workers=1
    ) as sender:
        sender.connect([submit(engine.init_collective_async(0, sender.ip, sender.port, 2, 1, 60.0))])
        for seed in (1, 2):
            policy.randomise(seed)
            sender.send(policy.version, [submit(engine.update_weights_from_collective_async(60.0))])
            request = engine.complete(
                PROMPT, SamplingSettings(max_tokens=64), seed=seed, policy_version=policy.version
            )
            sampled = leader.thread.run(request, 60, "a completion")
            assert_as_close_as_bfloat16(policy, PROMPT, sampled)
    stop(leader)
