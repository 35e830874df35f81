"""Checks of `policy.update_on: host` for test_host_update.py, on one or two ranks: its steps are the device's."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharding.send.source import local_part
from tests.support import critic_checks
from tests.support import policy_checks as checks
from tests.support.rank_checks import Checks
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.policy import FsdpPolicy, InPlacePolicy, Outputs
from trainer.policy.critic import Critic
from trainer.policy.fsdp import ShardedModel
from trainer.types import MicroBatch

STEPS = 20
SETTINGS = {"dtype": "bfloat16", "lr": 1e-3, "weight_decay": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "replicas": {"shard_size": 1},
    "frozen": {"freeze": ["model.layers.0"]},
    "adapters": {"lora": LoraConfig(rank=4, dropout=0.0)},
    "critic": {"kind": Critic},
    "recomputed": {"activation_checkpointing": "full"},
    "in place": {"kind": InPlacePolicy},
    "in place, float32": {"kind": InPlacePolicy, "dtype": "float32"},
}


def make(folder: Path, update_on: str, case: str, clip: float = 1e9, **policy: Any) -> ShardedModel:
    """Return a model of this case whose gradients are clipped to `clip`."""
    keys = SETTINGS | CASES[case] | {"update_on": update_on, "max_grad_norm": clip} | policy
    kind, lora = keys.pop("kind", FsdpPolicy), keys.pop("lora", None)
    more = {"lora": lora} if lora else {}
    source = checks.model_folder(folder)
    return kind(ModelConfig(path=str(source)), PolicyConfig(**keys), checks.CPU, **more)


def step(model: ShardedModel, factor: float = 1.0, lengths: list[int] = checks.LENGTHS) -> Any:
    """One update on two micro-batches or more; `factor` multiplies the loss, or a critic's values."""
    batches = checks.own_batches(checks.make_samples(lengths), 60)
    if isinstance(model, Critic):
        loss = critic_checks.squared_error(batches)
        return model.update(batches, lambda batch, values: loss(batch, values * factor))
    assert isinstance(model, FsdpPolicy)

    def loss_of(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Make the sampled tokens likelier."""
        return -(outputs.logprobs * batch.loss_mask).mean() * factor, {"n": batch.loss_mask.sum()}

    return model.update(batches, loss_of, checks.TEMPERATURE)


def state(model: ShardedModel) -> dict[str, Tensor]:
    """Copy of this rank's parts of weights and moments, by name."""
    kept = model.state_dict()
    return {
        f"{s} {n}": local_part(t).clone() for s in ("model", "optimizer") for n, t in kept[s].items()
    }


def check_host_update(folder: Path, case: str, tolerance: float = 0.0) -> None:
    """Clipped steps equal the device's, also from the other's checkpoint; a NaN changes nothing.

    They are equal bit for bit, or with a `tolerance` of norms relative to it: a GPU's AdamW rounds otherwise.
    """
    norm = step(make(folder, "device", case)).grad_norm
    device, host = (make(folder, where, case, clip=norm / 4) for where in ("device", "host"))
    for number in range(STEPS):
        stats = [step(model) for model in (device, host)]
        one, other = stats[0].grad_norm, stats[1].grad_norm
        assert abs(one - other) <= tolerance * one and (number or one > norm / 4)
        assert tolerance or stats[0] == stats[1]
        if number == STEPS // 2:
            crossed = [make(folder, where, case, clip=norm / 4) for where in ("device", "host")]
            for fresh, old in zip(crossed, (host, device), strict=True):
                fresh.load_state_dict(old.state_dict())
            device, host = crossed
    before = state(host)
    assert step(host, float("nan")).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(host).items())
    for name, tensor in state(device).items():
        assert (tensor.cpu() - before[name].cpu()).norm() <= tolerance * tensor.norm(), name


def two_ranks(folder: Path) -> Checks:
    """Return the checks of sharded cases on two ranks."""
    sharded = [case for case in CASES if not case.startswith("in place")]
    return {case: partial(check_host_update, folder, case) for case in sharded}
