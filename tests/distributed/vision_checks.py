"""What test_vision_ranks.py checks on two ranks: rows with images under FSDP2 and ZeRO-3 against one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from generation.images import ImageProcessor
from sharding.ranks import rank
from tests.distributed import policy_checks as checks
from tests.distributed import three_steps
from tests.distributed.deepspeed_checks import zero_policy
from tests.seen_rows import make_rows, plain_gradients
from trainer.distributed import init_process_group
from trainer.learning.batching import micro_batches
from trainer.parts import seeing
from trainer.types import Sample

CASES = ["fsdp packed", "fsdp padded", "fsdp recomputed", "fsdp frozen", "zero3 packed", "zero3 frozen"]
KINDS = ["qwen2_5_vl", "llava"]


def own_rows(samples: list[Sample]) -> list[Sample]:
    """Rank 0 has all images, in two of three micro-batches; rank 1 has none."""
    return [sample for sample in samples if bool(sample.images) == (rank() == 0)]


def check_gradients(folder: Path, case: str) -> None:
    """They are those of one process that has every row by itself, and none of what is frozen."""
    backend, way = case.split()
    settings: dict[str, Any] = {"freeze": ["vision"]} if way == "frozen" else {}
    if way == "recomputed":
        settings["activation_checkpointing"] = "full"
    processor = ImageProcessor(str(folder))
    samples = make_rows(processor)
    make = partial(zero_policy, stage=3) if backend == "zero3" else checks.make_policy
    policy = make(folder, **settings)
    batches = micro_batches(own_rows(samples), 60, 0, checks.CPU, packing=way != "padded")
    assert len(batches) > 1 and any(batch.images for batch in batches) == (rank() == 0)
    if backend == "zero3":
        from deepspeed.utils import safe_get_full_grad as gradient
    else:
        gradient = three_steps.fsdp_gradient
    got: dict[str, Any] = {}
    three_steps.update_and_look(policy, batches, gradient, 0.0, got)
    expected = plain_gradients(folder, processor, samples)
    if way == "frozen":
        parts = tuple(seeing(policy.model))
        assert not any(name.startswith(parts) for name in policy.state_dict()["model"])
        expected = {name: value for name, value in expected.items() if not name.startswith(parts)}
    used = {name: value for name, value in got.items() if name in expected or value.any()}
    checks.assert_gradients_equal(used, expected)


def two_ranks(models: str, results: str) -> None:
    init_process_group(60, "cpu")
    todo: dict[str, Callable[[], None]] = {
        f"{kind} {case}": partial(check_gradients, Path(models) / kind, case) for kind in KINDS for case in CASES
    }
    checks._on_ranks(todo, results)
