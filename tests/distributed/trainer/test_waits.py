"""No micro-batch makes the host wait for the device, on the one real rank of eight, on the CPU.

This covers forward, loss and backward, with the hooks of FSDP2 and ZeRO, and activation checkpointing; the waits at the
end of an update are listed. tests/cuda_lock/test_fake_devices.py covers operations that differ on CUDA.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sharding import ranks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks
from tests.support.simulated_ranks import same_message
from tests.support.waits import Waits
from trainer.config.schema import AlgorithmConfig, LoraConfig, ModelConfig, PolicyConfig
from trainer.learning.batching import micro_batches
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import CriticLoss, PolicyLoss
from trainer.policy import FsdpPolicy
from trainer.policy.critic import Critic
from trainer.policy.deepspeed import DeepSpeedPolicy
from trainer.policy.lora import NO_ADAPTERS

RANKS = 8
CPU = torch.device("cpu")
AT_ITS_END = {"trainer/policy/optimizer.py:over_ranks", "trainer/policy/deepspeed.py:_step"}
"""Waits once an update: the host reads loss and norm to decide whether to make the step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waits")
    checks.make_model("qwen2", folder, tied=False)
    return folder


@pytest.mark.parametrize(
    "kind", ["FSDP2", "FSDP2 with replicas", "adapters", "value head", "critic", "ZeRO-2", "ZeRO-3"]
)
def test_no_micro_batch_waits_for_the_device(folder: Path, kind: str) -> None:
    run_ranks(look_for_waits, 1, 300, [kind, str(folder)])


def look_for_waits(kind: str, folder: str) -> None:
    """An update of four micro-batches waits no more often than one of a single micro-batch."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    ranks._swap = same_message
    model = build(kind, ModelConfig(path=folder))
    for _ in range(2):
        update_waits(kind, model, 2)  # ZeRO-3 learns the order in which weights are needed
    one, four = update_waits(kind, model, 1), update_waits(kind, model, 4)
    print(kind, one, four)
    assert one == four, four - one
    assert set(one) <= AT_ITS_END
    dist.destroy_process_group()


def build(kind: str, model: ModelConfig) -> Any:
    """Make the policy or critic of this kind."""
    settings = PolicyConfig(
        dtype="bfloat16", activation_checkpointing="every_second", max_skipped_steps=1000
    )
    if kind == "critic":
        return Critic(model, settings, CPU)
    if kind.startswith("ZeRO"):
        return DeepSpeedPolicy(model, settings.model_copy(update={"zero_stage": int(kind[-1])}), CPU)
    if kind == "FSDP2 with replicas":
        settings = settings.model_copy(update={"shard_size": RANKS // 2})
    lora = (
        LoraConfig(rank=4, target_modules=["q_proj", "down_proj"]) if kind == "adapters" else NO_ADAPTERS
    )
    return FsdpPolicy(model, settings, CPU, value_head=kind == "value head", lora=lora)


def update_waits(kind: str, model: Any, count: int) -> Counter[str]:
    """Count the waits of an update of `count` micro-batches, by function."""
    batches = micro_batches(checks.make_samples(), 120, 0, CPU, count=4, packing=True)[:count]
    for batch in batches:
        for name in ("old_logprobs", "ref_logprobs", "old_values", "returns"):
            setattr(batch, name, torch.zeros_like(batch.loss_mask))
    minibatch = MiniBatch([], batches, 100, 9)
    config = AlgorithmConfig(preset="grpo", kl_coef=0.1, kl_in="loss", tis_cap=2.0)
    with Waits() as waits:
        if kind == "critic":
            model.update(batches, CriticLoss(config, minibatch))
        else:
            model.update(batches, PolicyLoss(config, minibatch, 32), 0.7)
    return waits.counts
