"""Checks of hybrid sharding on four ranks for test_hsdp.py: two replicas of the shards, on two ranks each."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sharding.send.source import FsdpWeightSource
from tests.support import critic_checks, three_steps
from tests.support import policy_checks as checks
from tests.support.gathering import assert_ranks_hold, sent_in_parts
from tests.support.rank_checks import Checks
from trainer.policy import FsdpPolicy
from trainer.run import checkpoint


def make_policy(folder: Path, shard_size: int | None = 2) -> FsdpPolicy:
    """Return a policy with the settings of `three_steps`, in shards over `shard_size` ranks."""
    return checks.make_policy(checks.model_folder(folder), **three_steps.SETTINGS, shard_size=shard_size)


def check_next_steps(policy: FsdpPolicy, folder: Path, first: int, last: int) -> None:
    """Steps `first` to `last` of 3 are those of a single process."""
    three_steps.check_next_steps(policy, checks.model_folder(folder), first, last)


def check_handed_over(folder: Path) -> None:
    """Continue from a checkpoint that one rank saved after step 1, and save step 2 for that rank to continue from."""
    policy = make_policy(folder)
    checkpoint.load(folder / "handed" / "step_1", {"policy": policy})
    check_next_steps(policy, folder, 2, 2)
    checkpoint.save(folder / "handed", 2, {"policy": policy}, {})


def check_groups(folder: Path) -> None:
    """A second model makes no new process groups, whose communicators would take memory on every GPU."""
    make_policy(folder)
    groups = set(dist.distributed_c10d._world.pg_map)
    make_policy(folder)
    assert set(dist.distributed_c10d._world.pg_map) == groups


def check_shards(folder: Path) -> None:
    """A rank holds half of the model; the engine is sent all of it, and the export has all of it."""
    policy = make_policy(folder)
    stored = load_file(checks.model_folder(folder) / "model.safetensors")
    held = sum(p.to_local().numel() for _, p in policy.named_parameters())
    assert 0.4 < held / sum(tensor.numel() for tensor in stored.values()) < 0.6
    source = FsdpWeightSource(list(policy.named_parameters()), torch.float32)
    parameters = source.parameters()
    slots = [torch.zeros(parameter.nbytes, dtype=torch.uint8) for parameter in parameters]
    source.gather_into([parameter.name for parameter in parameters], slots)
    assert {parameter.name for parameter in parameters} == stored.keys()
    for parameter, slot in zip(parameters, slots, strict=True):
        expected = stored[parameter.name]
        assert torch.equal(slot[: expected.nbytes].view(torch.float32).view(expected.shape), expected), (
            parameter.name
        )
    assert_ranks_hold(source, stored)
    assert all(
        torch.equal(weight, stored[name]) for name, weight in sent_in_parts(source, 1 << 14).items()
    )
    policy.save_pretrained(folder / "hsdp_export")
    exported = load_file(folder / "hsdp_export" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def four_ranks(folder: Path) -> Checks:
    """Return the checks of four ranks."""
    kinds = [checks.model_folder(folder, kind, tied) for kind, tied in checks.KINDS]
    run: Checks = {
        f"sent {kind.name}": lambda kind=kind: checks.check_sent(checks.make_policy(kind))
        for kind in kinds
    }
    return run | {
        "process groups": lambda: check_groups(folder),
        "steps": lambda: check_next_steps(make_policy(folder), folder, 1, 3),
        "handed over": lambda: check_handed_over(folder),
        "planned collectives": lambda: checks.check_planned_traffic(folder),
        "planned collectives of replicas": lambda: checks.check_planned_traffic(folder, shard_size=2),
        "half a model": lambda: check_shards(folder),
        "critic": lambda: critic_checks.check_values_and_gradients(folder, "qwen2", shard_size=2),
        "shared trunk": lambda: critic_checks.check_head_on_shared_trunk(folder, shard_size=2),
        "critic's state": lambda: critic_checks.check_state(folder, shard_size=2),
    }
