"""Comparison, by the cost model, of steps with engines on the training ranks and with engines on
ranks of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.placement import check_placement, placement, training_ranks
from trainer.config.schema import TrainConfig
from trainer.estimates.gpus import Gpu
from trainer.estimates.memory import over_budget
from trainer.estimates.model_sizes import ModelSizes
from trainer.estimates.time import NODE, Lengths, step_costs


@dataclass(frozen=True)
class RankSplit:
    """A division of ranks into generating and training ones, with the seconds of its step."""

    apart: int  # ranks that only generate; 0: all ranks do both
    lag: int
    seconds: float


def with_engines(config: TrainConfig, apart: int, lag: int) -> TrainConfig:
    """Return the recipe with `apart` ranks that only generate (0: none), and with the other keys
    that this requires.
    """
    sync_way = config.sync.way
    if apart:
        sync_way = "auto"
    elif placement(config).remote:
        sync_way = "staged"
    changed: dict[str, dict[str, Any]] = {
        "engine": {"placement": "ranks" if apart else "shared", "ranks": apart or 1, "replicas": 1},
        "rollout": {"lag": lag},
        "sync": {"way": sync_way},
        "policy": {"offload": "none"} if apart else {},
    }
    return config.model_copy(
        update={k: getattr(config, k).model_copy(update=new) for k, new in changed.items()}
    )


def compared(
    config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths
) -> Iterator[RankSplit]:
    """Yield the split with shared devices, and for either lag the fastest with engines on ranks of
    their own.

    Splits that the checks refuse, or that do not fit on `gpu`, are left out. With more ranks than a
    node has, whole nodes generate.
    """
    size = config.engine.tensor_parallel_size
    step = size if ranks <= NODE else max(size, NODE)
    for lag, counts in ((0, [0]), (0, range(step, ranks, step)), (1, range(step, ranks, step))):
        splits = []
        for apart in counts:
            recipe = with_engines(config, apart, lag)
            if any(check_placement(recipe, ranks, min(ranks, NODE))):
                continue
            if any(over_budget(recipe, model, training_ranks(recipe, ranks), gpu.memory_gib)):
                continue
            costs = step_costs(recipe, model, ranks, gpu, lengths)
            splits.append(RankSplit(apart, lag, sum(cost.seconds for cost in costs)))
        yield from sorted(splits, key=lambda split: split.seconds)[:1]


def comparison(
    config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths
) -> Iterator[str]:
    """Yield sentences with the seconds of a step in each split, and its speed relative to shared
    devices.
    """
    splits = list(compared(config, model, ranks, gpu, lengths))
    base = next((split.seconds for split in splits if not split.apart), None)
    for split in splits:
        apart = f"engine.placement: ranks, engine.ranks: {split.apart}, rollout.lag: {split.lag}"
        how = apart if split.apart else "every rank does both"
        against = ""
        if split.apart and base is not None:
            change = base / split.seconds - 1
            against = f", {abs(change):.0%} {'faster' if change >= 0 else 'slower'}"
        yield f"{how}: {split.seconds:.2f} s a step{against}"
    if not any(split.apart for split in splits):
        refused = next(
            check_placement(with_engines(config, config.engine.tensor_parallel_size, 0), ranks, ranks),
            "",
        )
        yield f"remote engines: {refused or 'they do not fit on these ranks'}"
