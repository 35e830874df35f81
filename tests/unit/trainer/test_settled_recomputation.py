"""What `policy.activation_checkpointing: auto` becomes: the least that fits, kept for a run's later sessions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import make_family
from tests.unit.trainer.commands.test_plan import recipe
from trainer import start as module
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import GIB, TIGHT, engine_parts, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.estimates.recomputation import with_chosen_recomputation
from trainer.run.keeper import RunState
from trainer.start import with_settled_recomputation

# Activations are most of an update, so that each choice needs clearly less than the one before
BATCH = {"prompts_per_step": 4096, "tokens_per_micro_batch": 400_000, "updates_per_step": 1}


def on_gpu(model: Path, **policy: Any) -> TrainConfig:
    return recipe(
        model,
        run={"device": "cuda"},
        engine={"kv_cache_gib": 0.1},
        batch=BATCH,
        policy={"dtype": "bfloat16"} | policy,
    )


def needed(config: TrainConfig, device_gib: float) -> float:
    model = model_sizes(config, config.model.path)
    parts = trainer_parts(config, model, 1, device_gib) + engine_parts(config, model, 1, device_gib)
    return sum(part.training for part in parts) / GIB


def chosen(config: TrainConfig, device_gib: float) -> str:
    return with_chosen_recomputation(config, 1, device_gib)[0].policy.activation_checkpointing


def test_the_least_that_fits_is_chosen(tiny_qwen2: Path) -> None:
    """Each value on the smallest device that it fits, and the next on one a little smaller."""
    order = ["none", "products", "full"]
    for layers, less in zip(order, [*order[1:], "full"], strict=True):
        gib = 8.0
        for _ in range(50):  # the head's blocks grow with the device
            gib = needed(on_gpu(tiny_qwen2, activation_checkpointing=layers), gib) / TIGHT
        assert chosen(on_gpu(tiny_qwen2), 1.001 * gib) == layers
        assert chosen(on_gpu(tiny_qwen2), 0.999 * gib) == less
    assert chosen(on_gpu(tiny_qwen2, backend="deepspeed"), 0.999 * gib) == "full"


def test_what_cannot_be_computed_is_not_chosen(tiny_qwen2: Path, tmp_path: Path) -> None:
    make_family("gpt_oss", tmp_path).save_pretrained(tmp_path / "gpt_oss")
    for config in (
        on_gpu(tiny_qwen2, backend="deepspeed"),
        on_gpu(tmp_path / "gpt_oss"),
    ):
        gib = [device / 20 for device in range(20, 400)]
        assert {chosen(config, device) for device in gib} == {"none", "full"}
    offloaded = on_gpu(tiny_qwen2, offload_activations=True)
    assert chosen(offloaded, 1000.0) == "products", "inputs of recomputed layers alone are moved"


def settled(
    config: TrainConfig, state: RunState, gib: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str]]:
    notes: list[str] = []
    monkeypatch.setattr(module.torch.cuda, "mem_get_info", lambda: (0, int(gib * GIB)))
    config = with_settled_recomputation(config, state, notes.append)
    return config.policy.activation_checkpointing, notes


def test_a_resumed_run_keeps_what_it_began_with(
    tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a larger device as well, unless the recipe names a value."""
    state = RunState()
    layers, notes = settled(on_gpu(tiny_qwen2), state, 3.0, monkeypatch)
    assert layers == "full" and "is full, with which an update takes" in notes[0]
    resumed = replace(state)
    expected = ["policy.activation_checkpointing is full, as in the run's earlier sessions"]
    assert settled(on_gpu(tiny_qwen2), resumed, 1000.0, monkeypatch) == ("full", expected)
    assert settled(on_gpu(tiny_qwen2), RunState(), 1000.0, monkeypatch)[0] == "none"
    named = on_gpu(tiny_qwen2, activation_checkpointing="every_second")
    assert settled(named, resumed, 1000.0, monkeypatch) == ("every_second", [])
    assert resumed.recomputation == "every_second"


def test_a_cpu_recomputes_nothing(tiny_qwen2: Path) -> None:
    """Nor says anything: its runs are as they were."""
    state, notes = RunState(), list[str]()
    config = with_settled_recomputation(recipe(tiny_qwen2), state, notes.append)
    assert config.policy.activation_checkpointing == state.recomputation == "none"
    assert not notes
