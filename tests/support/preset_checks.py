"""Train every preset's learner in turn on two ranks with one engine each, started once; for test_presets.py."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharding.ranks import exchange, rank, world_size
from trainer.config.algorithm import PRESETS
from trainer.config.checks import check_config
from trainer.config.recipe import load_config
from trainer.config.schema import TrainConfig
from trainer.distributed import destroy_process_group, init_process_group, store
from trainer.learning import Learner
from trainer.loop import RLTrainer
from trainer.policy import FsdpPolicy, Policy
from trainer.policy.critic import Critic, make_critic
from trainer.run import processes
from trainer.run.watchdog import Watchdog

STEPS = 2
SHARED = ("grpo", "gspo", "ppo")
"""Presets whose updates share sequences between both ranks (`policy.sequence_parallel`)."""

SETTINGS = {"gspo": ["batch.updates_per_step=4"], "distill": ["algorithm.teacher=${model.path}"]}


def preset_config(recipe: str, preset: str) -> TrainConfig:
    """Load the recipe with a preset, and check it."""
    ways = 2 if preset in SHARED else 1
    settings = [
        f"algorithm.preset={preset}",
        f"policy.sequence_parallel={ways}",
        *SETTINGS.get(preset, []),
    ]
    config = load_config(Path(recipe), settings)
    check_config(config, "train")
    return config


def train_presets(recipe: str, results: str) -> None:
    """Write each preset's metrics to `results`, with whether ranks agree, and how far weights have moved."""
    processes.start_guardian()
    init_process_group(120, "cpu")
    reports: dict[str, dict[str, Any]] = {}
    with Watchdog(store(), rank(), world_size()) as watchdog, ExitStack() as resources:
        trainer = RLTrainer(preset_config(recipe, "dapo"), watchdog, resources)
        # So that checkpoints keep what it decides
        assert trainer.learner.shortcuts is trainer.state.shortcuts
        assert trainer.learner.sharing_required is False
        config, device = trainer.config, trainer.policy.device
        reference = FsdpPolicy(config.model, config.policy, device, trainable=False)
        critic = make_critic(config, device, STEPS)
        for preset in PRESETS:
            reports[preset] = train_preset(trainer, preset_config(recipe, preset), reference, critic)
    if rank() == 0:
        Path(results).write_text(json.dumps(reports))
    destroy_process_group()


def train_preset(
    trainer: RLTrainer, config: TrainConfig, reference: FsdpPolicy, critic: Critic
) -> dict[str, Any]:
    """Train a few steps as if the trainer had been built for `config`, from the weights that it has."""
    algorithm = config.algorithm
    trainer.config, trainer.learner = (
        config,
        Learner(
            config,
            trainer.policy,
            reference if algorithm.kl_coef or algorithm.teacher else None,
            trainer.tokenizer.pad_token_id,
            trainer.rewards.weights,
            critic if algorithm.advantage_record.takes("values") else None,
        ),
    )
    trainer.source._config = config
    rows: list[dict[str, float]] = []
    trainer.log = lambda step, metrics: rows.append(metrics)  # type: ignore[method-assign]
    before, critic_before = weights(trainer.policy), weights(critic)
    for _ in range(STEPS):
        trainer.train_step(trainer.state.step + 1)
    everywhere = [json.loads(row) for row in exchange(json.dumps(rows))]
    return {
        "rows": rows,
        "ranks agree": all(learned(other) == learned(rows) for other in everywhere),
        "moved": distance(before, weights(trainer.policy)),
        "critic moved": distance(critic_before, weights(critic)),
    }


def weights(model: Policy | Critic) -> list[Tensor]:
    """Copy of this rank's part of the weights."""
    return [p.detach().to_local().clone() for _, p in model.named_parameters()]


def distance(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest change of any weight on this rank."""
    return max(
        ((a - b).abs().max().item() for a, b in zip(before, after, strict=True) if a.numel()),
        default=0.0,
    )


def learned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows without figures of time and memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def finite(rows: list[dict[str, float]]) -> bool:
    """Tell whether all metrics are finite."""
    return all(torch.isfinite(torch.tensor(value)) for row in rows for value in row.values())
