"""The recipe of a `Training`: a file or defaults, changed by sections, and what it refuses."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.checks import find_problems
from trainer.config.machine import rank_count
from trainer.config.placement import placement
from trainer.config.recipe import load_config, sentences
from trainer.config.schema import TrainConfig
from trainer.config.sync_ways import way, with_staged_way
from trainer.errors import UserError
from trainer.model_checks import check_model

_UNREAD = ("data.", "reward.", "eval.", "sft.", "rollout.", "run.name", "run.output_dir")
"""Sections of a recipe that no call reads, and whose problems therefore do not matter."""


def settings_of(
    model: str, lora_rank: int | None, recipe: str | None, sections: Mapping[str, Any]
) -> TrainConfig:
    """Return the recipe with its model, the rank of its adapters and `sections` of keys replaced.

    Raises UserError for wrong keys, and for settings with which no loop of one's own works.
    """
    for name, keys in sections.items():
        if not isinstance(keys, Mapping):
            example = 'policy={"lr": 1e-4}'
            raise UserError(f"{name} is {keys!r}: give the keys of a section, such as {example}")
    changed = {name: dict(keys) for name, keys in sections.items()}
    changed["model"] = {"path": model, **changed.get("model", {})}
    if lora_rank is not None:
        changed["lora"] = {"rank": lora_rank, **changed.get("lora", {})}
    if recipe is None:
        changed["data"] = {"path": "unread", **changed.get("data", {})}
        try:
            config = TrainConfig.model_validate(changed)
        except ValidationError as error:
            raise UserError(*sentences(error, changed)) from error
    else:
        overrides = []
        for name, keys in changed.items():
            overrides += [f"{name}.{key}={json.dumps(value)}" for key, value in keys.items()]
        config = load_config(Path(recipe), overrides)
    config = with_staged_way(config)  # auto could stand for zero_copy
    if refused := list(_refused(config)):
        raise UserError(*refused)
    problems = find_problems(config, "sft", os.environ)
    if problems := [problem for problem in problems if not problem.startswith(_UNREAD)]:
        raise UserError(*problems)
    return check_model(config, "sft")


def _refused(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each setting with which a loop of one's own does not work."""
    only = "works in hotbunk train alone"
    if config.policy.backend != "fsdp":
        yield f"policy.backend: {config.policy.backend} {only}: set it to fsdp"
    if way(config).shares_memory:
        yield f"sync.way: {config.sync.way} {only}: set it to staged or pull"
    if config.policy.sequence_parallel > 1:
        yield f"policy.sequence_parallel {only}: set it to 1"
    if config.model.routes != "own":
        yield f"model.routes: {config.model.routes} {only}: set it to own"
    if placement(config).remote:
        yield f"engine.placement: {config.engine.placement} {only}: set it to shared"
    size = config.engine.tensor_parallel_size
    ranks = rank_count(os.environ)
    if ranks % size:
        yield f"engine.tensor_parallel_size is {size}: choose a divisor of the number of ranks, {ranks}"
