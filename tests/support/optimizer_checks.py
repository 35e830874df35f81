"""Checks of optimizers other than AdamW on one rank or several, for test_optimizers.py of distributed/."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sharding.ranks import world_size
from tests.support import policy_checks as checks
from tests.support import three_steps
from tests.support.rank_checks import Checks
from trainer.policy.muon import ShardedMuon
from trainer.run import checkpoint

HIDDEN = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
SGD = {"optimizer": "torch.optim:SGD", "optimizer_options": {"momentum": 0.9, "dampening": 0.5}}
CASES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "muon, mixture": {"optimizer": "muon", "optimizer_options": {"nesterov": False}},
    "own": SGD | {"eps": 1e-8},
}


def plain_optimizers(case: str, named: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return the case's optimizers as torch has them; experts lie in one tensor and are AdamW's."""
    decay = three_steps.SETTINGS["weight_decay"]
    if case == "own":
        vectors, matrices = (
            [p for p in named.values() if (p.dim() == 1) == one] for one in (True, False)
        )
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return [torch.optim.SGD(groups, weight_decay=decay, momentum=0.9, dampening=0.5)]
    hidden = {name: p for name, p in named.items() if name.endswith(HIDDEN)}
    others = {name: p for name, p in named.items() if name not in hidden}
    options = {"adjust_lr_fn": "match_rms_adamw"} | CASES[case].get("optimizer_options", {})
    return [
        torch.optim.Muon(hidden.values(), weight_decay=decay, **options),
        *three_steps.plain_adamw(others),
    ]


def model_of(folder: Path, case: str) -> Path:
    """Return the folder of the case's model."""
    return checks.model_folder(folder, *(("qwen3_moe", False) if "mixture" in case else ("qwen2", True)))


def make(folder: Path, case: str, **more: Any) -> Any:
    """Return a policy of this case, whose gradients are clipped."""
    return checks.make_policy(model_of(folder, case), **three_steps.SETTINGS | CASES[case] | more)


def check_steps(folder: Path, case: str) -> None:
    """Three clipped steps are those of torch's optimizers on a plain copy of the model.

    Newton-Schulz iterations in bfloat16 round another gradient otherwise, so that Muon's weights have some slack.
    """
    plain = three_steps.plain_steps(
        model_of(folder, case), checks.make_samples(), partial(plain_optimizers, case)
    )
    policy, slack = make(folder, case), 1.0 if case == "own" else 20.0
    three_steps.check_steps(policy, three_steps.fsdp_gradient, checks.weights, list(plain), slack)


def check_muon_bit_for_bit() -> None:
    """With equal gradients, sharded matrices of even and uneven shapes are torch's whole ones after three steps."""
    random = torch.Generator().manual_seed(0)
    shapes = [(64, 32), (7, 33), (1, 8), (5, 2), (64, 32)]
    mesh = dist.init_device_mesh("cpu", (world_size(),))
    for options in ({}, {"nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}):
        values = [torch.randn(shape, generator=random) for shape in shapes]
        whole = [nn.Parameter(value.clone()) for value in values]
        cut = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
        optimizers = torch.optim.Muon(whole, 0.1, **options), ShardedMuon(cut, 0.1, **options)
        for parameter in cut:
            optimizers[1].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        for _ in range(3):
            for one, other in zip(whole, cut, strict=True):
                one.grad = torch.randn(one.shape, generator=random)
                other.grad = distribute_tensor(one.grad, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(whole, cut, strict=True):
            assert torch.equal(one, other.detach().full_tensor()), (tuple(one.shape), options)


def full_state(policy: Any) -> dict[str, Tensor]:
    """Copy of the whole tensors of weights and optimizer state."""
    state = policy.state_dict()
    tensors = {f"{part} {name}": t for part in ("model", "optimizer") for name, t in state[part].items()}
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()
    }


def check_saved(folder: Path, case: str) -> None:
    """Save after two steps, and the state after a third; the saved state continues to it, bit for bit."""
    policy, batches = make(folder, case), checks.own_batches(checks.make_samples(), 60)
    loss = checks.make_loss(batches)
    for _ in range(2):
        policy.update(batches, loss, checks.TEMPERATURE)
    checkpoint.save(folder / case, 2, {"policy": policy}, {})
    saved = full_state(policy)
    policy.update(batches, loss, checks.TEMPERATURE)
    resumed = make(folder, case)
    checkpoint.load(folder / case / "step_2", {"policy": resumed})
    resumed.update(batches, loss, checks.TEMPERATURE)
    expected, state = full_state(policy), full_state(resumed)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    torch.save(saved, folder / f"{case}.pt")


def check_loaded(folder: Path, case: str) -> None:
    """Another number of ranks loads what `check_saved` saved."""
    policy = make(folder, case)
    checkpoint.load(folder / case / "step_2", {"policy": policy})
    expected, state = torch.load(folder / f"{case}.pt"), full_state(policy)
    assert state.keys() == expected.keys() and policy.version == 2
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    run: Checks = {f"steps {case}": partial(check_steps, folder, case) for case in CASES}
    run |= {f"saved {case}": partial(check_saved, folder, case) for case in ("muon", "own")}
    return run | {
        "muon bit for bit": check_muon_bit_for_bit,
        "offloaded state of muon": partial(checks.check_fsdp_shifts, folder, optimizer="muon"),
    }


def four_ranks(folder: Path) -> Checks:
    """Return the checks of four ranks, which load, with replicas, what two have saved; and steps."""
    run: Checks = {f"loaded {case}": partial(check_loaded, folder, case) for case in ("muon", "own")}
    return run | {"muon bit for bit": check_muon_bit_for_bit}
