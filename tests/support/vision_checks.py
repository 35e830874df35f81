"""Checks of rows with images under FSDP2 and ZeRO-3 against one process, for test_vision_ranks.py on two ranks."""

import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

from generation.images import ImageProcessor
from sharding.ranks import rank
from tests.support import critic_checks, three_steps
from tests.support import policy_checks as checks
from tests.support.deepspeed_checks import zero_policy
from tests.support.image_rows import make_rows, plain_forward, plain_gradients
from tests.support.rank_checks import Checks
from tests.support.sequence_checks import sharing
from trainer.learning.batching import micro_batches
from trainer.model_structure import vision_modules
from trainer.types import MicroBatch, Sample

CASES = ["fsdp packed", "fsdp padded", "fsdp recomputed", "fsdp frozen", "zero3 packed", "zero3 frozen"]
CASES += ["fsdp shared", "zero3 shared", "packed critic", "shared critic"]
KINDS = ["qwen2_5_vl", "llava", "qwen3_vl"]
# Qwen3-VL's layers take image features as well, which matters only where ranks share a sequence.
RUNS = [
    (kind, case) for kind, case in product(KINDS, CASES) if kind != "qwen3_vl" or case == "fsdp shared"
]


def add_head(folder: Path) -> None:
    """Make a reward model from the model in `folder`, beside it."""
    shutil.copytree(folder, target := folder.with_name(f"{folder.name}_reward"))
    weights = load_file(target / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(4))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def make_batches(samples: list[Sample], way: str) -> list[MicroBatch]:
    """Micro-batches of this rank's own rows, or shared by both ranks, which may cut through an image."""
    if way != "shared":
        batches = micro_batches(own_rows(samples), 60, 0, checks.CPU, packing=way != "padded")
        assert len(batches) > 1 and any(batch.images for batch in batches) == (rank() == 0)
        return batches
    batches = micro_batches(samples, 20, 0, checks.CPU, packing=True, ways=2)
    packs = [(batch.layout.pack, batch) for batch in batches if batch.layout.pack and batch.images]
    assert len(packs) < len(batches)  # some have no image
    ends = [
        (p.parts[0], sum(p.lengths[: i.row]) + i.start, i.length) for p, b in packs for i in b.images
    ]
    assert {(end > start) + (end >= start + size) for end, start, size in ends} == {
        0,
        1,
        2,
    }  # after, across, before the cut
    return batches


def own_rows(samples: list[Sample]) -> list[Sample]:
    """Return this rank's rows: rank 0 has all images, in two of three micro-batches; rank 1 has none."""
    return [sample for sample in samples if bool(sample.images) == (rank() == 0)]


def check_gradients(folder: Path, case: str) -> None:
    """Gradients are those of one process that computes one row at a time; frozen parameters have none."""
    backend, way = case.split()
    settings: dict[str, Any] = {"freeze": ["vision"]} if way == "frozen" else {}
    if way == "recomputed":
        settings["activation_checkpointing"] = "full"
    processor = ImageProcessor(str(folder))
    samples = make_rows(processor)
    make = partial(zero_policy, stage=3) if backend == "zero3" else checks.make_policy
    policy = make(folder, **settings)
    batches = make_batches(samples, way)
    if backend == "zero3":
        from deepspeed.utils import safe_get_full_grad as gradient
    else:
        gradient = three_steps.fsdp_gradient
    got: dict[str, Any] = {}
    three_steps.update_and_look(policy, batches, gradient, 0.0, got)
    expected = plain_gradients(folder, processor, samples)
    if way == "frozen":
        parts = tuple(vision_modules(policy.model))
        assert not any(name.startswith(parts) for name in policy.state_dict()["model"])
        expected = {name: value for name, value in expected.items() if not name.startswith(parts)}
    used = {name: value for name, value in got.items() if name in expected or value.any()}
    checks.assert_gradients_equal(used, expected)


def check_critic(folder: Path, way: str) -> None:
    """Values and gradients of a critic with a trunk of its own are those of a plain model with a linear head."""
    processor = ImageProcessor(str(folder))
    samples, critic = make_rows(processor), critic_checks.make_critic(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    head = nn.Parameter(load_file(folder / "model.safetensors")["score.weight"])
    expected = [
        plain_forward(plain, processor, row).hidden_states[-1][0, :-1] @ head[0] for row in samples
    ]
    masks = [torch.tensor(row.loss_mask[1:]).bool() for row in samples]
    mine = [n for n, row in enumerate(samples) if way == "shared" or bool(row.images) == (rank() == 0)]
    batches = make_batches(samples, way)
    for batch, values in zip(batches, critic.score(batches), strict=True):
        for row, number in enumerate(mine[index] for index in batch.rows):
            wanted = expected[number].detach() * masks[number]
            torch.testing.assert_close(values[row, : len(wanted)], wanted, atol=2e-5, rtol=1e-5)
    got = critic_checks.captured_gradients(
        critic, lambda: critic.update(batches, critic_checks.squared_error(batches))
    )
    errors = [
        (value[mask] - critic_checks.GOAL) ** 2 for value, mask in zip(expected, masks, strict=True)
    ]
    torch.cat(errors).mean().backward()
    named = {
        name: p.grad
        for name, p in [*plain.named_parameters(), ("score.weight", head)]
        if p.grad is not None
    }
    checks.assert_gradients_equal(
        {name: value for name, value in got.items() if name in named or value.any()}, named
    )


def two_ranks(folder: Path) -> Checks:
    """Return the checks of two ranks."""
    todo: Checks = {}
    for kind, case in RUNS:
        check = partial(check_gradients, folder / kind, case)
        if case.endswith("critic"):
            check = partial(check_critic, folder / f"{kind}_reward", case.split()[0])
        todo[f"{kind} {case}"] = sharing(2, check) if "shared" in case else check
    return todo
