"""Checks of each ZeRO stage, and of FSDP2 beside them, against one process, for test_deepspeed.py on two ranks."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import policy_checks as checks
from tests.support import three_steps
from tests.support.rank_checks import Checks
from tests.support.recipes import make_config
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.estimates.memory import ZERO_BUCKET, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.policy import FsdpPolicy, hf_format
from trainer.policy.deepspeed import DeepSpeedPolicy
from trainer.policy.optimizer import TrainingDiverged
from trainer.run import checkpoint

STAGES = (1, 2, 3)


def zero_policy(folder: Path, stage: int, **settings: Any) -> DeepSpeedPolicy:
    """Return a ZeRO policy in float32 whose gradients are not clipped."""
    settings = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": 1e9} | settings
    config = PolicyConfig(backend="deepspeed", zero_stage=stage, **settings)  # type: ignore[arg-type]
    return DeepSpeedPolicy(ModelConfig(path=str(folder)), config, checks.CPU)


def masters(policy: FsdpPolicy | DeepSpeedPolicy) -> dict[str, Tensor]:
    """Copy of the whole master weights."""
    return {name: tensor.full_tensor().clone() for name, tensor in policy.state_dict()["model"].items()}


def check_three_steps(folder: Path, stage: int, kind: str, tied: bool, **settings: Any) -> None:
    """Losses, gradients and weights of three steps are the plain ones, those of experts and of offloading included."""
    from deepspeed.utils import safe_get_full_grad

    source = checks.model_folder(folder, kind, tied)
    policy = zero_policy(source, stage, **three_steps.SETTINGS | settings)
    expected = list(three_steps.plain_steps(source, checks.make_samples()))
    three_steps.check_steps(policy, safe_get_full_grad, masters, expected)


def check_routed(folder: Path, stage: int) -> None:
    """A mixture computes as one process does, with given routes, and with recorded ones and a balance loss."""
    from deepspeed.utils import safe_get_full_grad

    def gradients(policy: DeepSpeedPolicy, batches: Any, name: str) -> dict[str, Tensor]:
        captured: dict[str, Tensor] = {}
        step = policy.engine.step

        def capture() -> None:
            captured.update(
                {name: safe_get_full_grad(p).clone() for name, p in policy.named_parameters()}
            )
            step()

        policy.engine.step = capture
        policy.update(batches, checks.make_loss(batches, name), checks.TEMPERATURE)
        return captured

    checks.check_routed(folder, lambda source: zero_policy(source, stage), gradients)


def check_fsdp_steps(folder: Path, **settings: Any) -> None:
    """Three steps under FSDP2 are the plain ones."""
    source = checks.model_folder(folder)
    policy = checks.make_policy(source, **three_steps.SETTINGS | settings)
    expected = list(three_steps.plain_steps(source, checks.make_samples()))
    three_steps.check_steps(policy, three_steps.fsdp_gradient, masters, expected)


def check_source(folder: Path, stage: int, kind: str, tied: bool) -> None:
    """The engine would be sent exactly the checkpoint, and nothing stays gathered."""
    policy = zero_policy(checks.model_folder(folder, kind, tied), stage)
    checks.check_sent(policy)
    if stage == 3:
        assert all(p.numel() == 0 for _, p in policy.named_parameters())


def check_route_bias(folder: Path, stage: int) -> None:
    """The bias that decides routes is the checkpoint's, in float32, whatever dtype the policy computes in."""
    policy = zero_policy(checks.model_folder(folder, "deepseek_v3", False), stage, dtype="bfloat16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = load_file(policy.source / "model.safetensors")[name]
    assert not torch.equal(stored, stored.bfloat16().float()), "rounding would show"
    assert torch.equal(policy.model.get_buffer(name), stored)


def check_nan_on_one_rank(folder: Path, stage: int) -> None:
    """A NaN on one rank skips the update on all; the second in a row ends the training."""
    policy = zero_policy(checks.model_folder(folder), stage, max_skipped_steps=2)
    batches = checks.own_batches(checks.make_samples(), 60)
    bad = checks.make_loss(batches, factor=float("nan") if checks.rank() == 1 else 1.0)
    before = masters(policy)
    assert policy.update(batches, bad, checks.TEMPERATURE).skipped
    assert all(torch.equal(w, before[name]) for name, w in masters(policy).items())
    assert not policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE).skipped
    assert (policy.version, policy.updates.skipped_in_a_row) == (1, 0)
    assert any(not torch.equal(w, before[name]) for name, w in masters(policy).items())
    policy.update(batches, bad, checks.TEMPERATURE)
    with pytest.raises(TrainingDiverged, match="2 updates in a row"):
        policy.update(batches, bad, checks.TEMPERATURE)


def check_checkpoints_cross(folder: Path, stage: int) -> None:
    """FSDP2's checkpoint is trained further under ZeRO and back: the third step is as if it had never moved."""
    source = checks.model_folder(folder)
    batches = checks.own_batches(checks.make_samples(), 60)

    def step(policy: FsdpPolicy | DeepSpeedPolicy) -> float:
        return policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE).loss

    straight, first = checks.make_policy(source), checks.make_policy(source)
    losses = [step(straight) for _ in range(3)]
    assert step(first) == losses[0]
    saved = checkpoint.save(folder / f"cross_{stage}", 1, {"policy": first}, {})
    second = zero_policy(source, stage)
    checkpoint.load(saved, {"policy": second})
    assert second.version == 1
    assert step(second) == pytest.approx(losses[1], rel=1e-6)
    saved = checkpoint.save(folder / f"cross_{stage}", 2, {"policy": second}, {})
    third = checks.make_policy(source)
    checkpoint.load(saved, {"policy": third})
    assert step(third) == pytest.approx(losses[2], rel=1e-6)
    wanted = masters(straight)
    for name, weight in masters(third).items():
        torch.testing.assert_close(weight, wanted[name], atol=2e-5, rtol=1e-5)


def check_export(folder: Path, stage: int, kind: str, tied: bool) -> None:
    """An exported model opens in plain Transformers with the master weights."""
    source, target = checks.model_folder(folder, kind, tied), folder / f"zero_export_{kind}_{stage}"
    policy = zero_policy(source, stage)
    batches = checks.own_batches(checks.make_samples(), 60)
    policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
    policy.save_pretrained(target)
    plain = dict(AutoModelForCausalLM.from_pretrained(target, dtype="auto").named_parameters())
    assert plain.keys() == masters(policy).keys()
    assert all(torch.equal(plain[name], weight) for name, weight in masters(policy).items())


def check_small_steps_are_not_lost(folder: Path, stage: int) -> None:
    """Steps too small for bfloat16 still change most of the float32 master weights."""
    policy = zero_policy(checks.model_folder(folder), stage, dtype="bfloat16", lr=1e-6)
    before = masters(policy)
    batches = checks.own_batches(checks.make_samples(), 60)
    policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE)
    changed = sum(int((weight != before[name]).sum()) for name, weight in masters(policy).items())
    assert changed > 0.5 * sum(weight.numel() for weight in before.values())


def check_read_once(folder: Path, stage: int) -> None:
    """A bfloat16 checkpoint is read once; a float32 one is read again for the master weights."""
    source = checks.model_folder(folder)
    half = folder / f"half_{stage}"
    if checks.rank() == 0:
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(half)
    dist.barrier()  # no rank reads a half-written file
    read: list[int] = []
    real = hf_format.SafetensorsFolder.read

    def counted(files: Any, views: Any, begin: int, end: int, *rest: Any) -> Tensor:
        read.append(end - begin)
        return real(files, views, begin, end, *rest)

    hf_format.SafetensorsFolder.read = counted  # type: ignore[method-assign]
    try:
        policy = zero_policy(half, stage, dtype="bfloat16")
        total = sum(weight.numel() for weight in masters(policy).values())
        assert sum(read) == total, (sum(read), total)
        stored = dict(AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32).named_parameters())
        assert all(torch.equal(weight, stored[name]) for name, weight in masters(policy).items())
        read.clear()
        zero_policy(source, stage, dtype="bfloat16")
        assert sum(read) == 2 * total
    finally:
        hf_format.SafetensorsFolder.read = real  # type: ignore[method-assign]


def check_planned_memory(folder: Path, stage: int) -> None:
    """Between updates a rank holds what the plan says, DeepSpeed's buffers included, to within 1 %."""
    path = checks.model_folder(folder)
    sections = {
        "policy": {"backend": "deepspeed", "zero_stage": stage, "dtype": "bfloat16"},
        "run": {"device": "cpu"},
    }
    config = make_config(model={"path": str(path)}, **sections)
    parts = trainer_parts(config, model_sizes(config, str(path)), checks.world_size(), 80.0)
    planned = {part.name: part.generating for part in parts}
    gc.collect()
    before = storages()
    policy = zero_policy(path, stage, dtype="bfloat16")
    gc.collect()
    held = sum(nbytes for place, nbytes in storages().items() if place not in before)
    # So large that it would hide an error in the other parts
    bucket = planned.pop("policy: bucket of gradients", 0)
    assert held - bucket == pytest.approx(sum(planned.values()), rel=0.01), (held, planned)
    assert policy.version == 0 and bucket == (0 if stage < 3 else 4 * ZERO_BUCKET)


def storages() -> dict[int, int]:
    """Return the bytes of every CPU storage that Python's tensors use, by address."""
    tensors = (
        item for item in gc.get_objects() if issubclass(type(item), Tensor) and item.device.type == "cpu"
    )
    pieces = (tensor.untyped_storage() for tensor in tensors)
    return {piece.data_ptr(): piece.nbytes() for piece in pieces if piece.nbytes()}


def check_zero_shifts(folder: Path, stage: int, dtype: str = "float32") -> None:
    """A policy that offloads its memory between updates makes the same updates, bit for bit."""

    def weights(policy: DeepSpeedPolicy) -> list[Tensor]:
        return [getattr(p, "ds_tensor", p) for _, p in policy.named_parameters()]

    checks.check_shifts(
        lambda what: zero_policy(checks.model_folder(folder), stage, offload=what, dtype=dtype), weights
    )


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    run: Checks = {}
    for stage in STAGES:
        run[f"steps zero {stage}"] = lambda s=stage: check_three_steps(folder, s, "qwen2", True)
        run[f"NaN on one rank {stage}"] = lambda s=stage: check_nan_on_one_rank(folder, s)
        run[f"checkpoint of FSDP {stage}"] = lambda s=stage: check_checkpoints_cross(folder, s)
        run[f"offloading {stage}"] = lambda s=stage: check_zero_shifts(folder, s)
    for stage in (2, 3):  # recipes may not combine stage 1 with bfloat16
        run[f"small steps {stage}"] = lambda s=stage: check_small_steps_are_not_lost(folder, s)
        run[f"offloading in bfloat16 {stage}"] = lambda s=stage: check_zero_shifts(folder, s, "bfloat16")
        run[f"route bias {stage}"] = lambda s=stage: check_route_bias(folder, s)
        run[f"read once {stage}"] = lambda s=stage: check_read_once(folder, s)
        run[f"planned memory {stage}"] = lambda s=stage: check_planned_memory(folder, s)
    run["steps fsdp"] = lambda: check_fsdp_steps(folder)
    run["steps hsdp, whole on every rank"] = lambda: check_fsdp_steps(folder, shard_size=1)
    run["steps zero 3, experts"] = lambda: check_three_steps(folder, 3, "qwen3_moe", False)
    run["routed"] = lambda: check_routed(folder, 3)
    run["steps zero 3, offloaded"] = lambda: check_three_steps(
        folder, 3, "llama", False, update_on="host"
    )
    run["export whole"] = lambda: check_export(folder, 2, "qwen2", True)
    run["export cut"] = lambda: check_export(folder, 3, "qwen3_moe", False)
    run["sent whole"] = lambda: check_source(folder, 1, "qwen2", True)
    for kind, tied in checks.KINDS:
        run[f"sent cut {kind} {tied}"] = lambda k=kind, t=tied: check_source(folder, 3, k, t)
    return run
