"""The memory that `hotbunk plan` names for two ranks is what two ranks hold, to the byte."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.launch import run_ranks
from tests.support.recipes import make_config


def measure(model: str, output: str) -> None:
    """Build the policy and its weight source; rank 0 writes their sizes in bytes."""
    import torch

    from sharding.ranks import rank
    from sharding.send.buckets import BucketPlan
    from sharding.send.source import FsdpWeightSource
    from sharding.wire.staging import BUFFERS
    from trainer.config.schema import ModelConfig, PolicyConfig
    from trainer.distributed import destroy_process_group, init_process_group
    from trainer.policy import FsdpPolicy

    init_process_group(60, "cpu")
    policy = FsdpPolicy(ModelConfig(path=model), PolicyConfig(dtype="float32"), torch.device("cpu"))
    state = policy.state_dict()
    sizes = {
        part: sum(tensor.to_local().nbytes for tensor in state[part].values())
        for part in ("model", "optimizer")
    }
    muon = FsdpPolicy(
        ModelConfig(path=model), PolicyConfig(dtype="float32", optimizer="muon"), torch.device("cpu")
    )
    sizes["muon"] = sum(tensor.to_local().nbytes for tensor in muon.state_dict()["optimizer"].values())
    source = FsdpWeightSource(list(policy.named_parameters()), torch.bfloat16)
    sizes["staging"] = BUFFERS * BucketPlan(source.parameters(), 1 << 20).capacity
    if rank() == 0:
        Path(output).write_text(json.dumps(sizes))
    destroy_process_group()


def test_two_ranks_hold_the_planned_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from trainer.estimates.memory import staging_bytes, trainer_parts
    from trainer.estimates.model_sizes import model_sizes, optimizer_bytes

    model = tiny_model(architecture="qwen2", tied=False)
    run_ranks(measure, 2, arguments=[str(model), str(tmp_path / "sizes.json")])
    held = json.loads((tmp_path / "sizes.json").read_text())
    sections = {
        "engine": {"dtype": "bfloat16"},
        "sync": {"bucket_mib": 1},
        "policy": {"dtype": "float32"},
    }
    config = make_config(model={"path": str(model)}, **sections)
    sizes = model_sizes(config, config.model.path)
    parts = {part.name: part.generating for part in trainer_parts(config, sizes, 2, 80.0)}
    assert parts["policy: float32 weights"] == held["model"]
    assert parts["policy: optimizer state"] == held["optimizer"]
    muon = config.model_copy(update={"policy": config.policy.model_copy(update={"optimizer": "muon"})})
    assert optimizer_bytes(muon.policy, sizes, 2) == held["muon"] < held["optimizer"]
    parts = {part.name: part.generating for part in trainer_parts(muon, sizes, 2, 80.0)}
    assert parts["policy: optimizer state"] == held["muon"]
    assert staging_bytes(config, sizes, 2, cut=False) == held["staging"]
