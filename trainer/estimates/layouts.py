"""Whether a step is shorter with engines on the ranks that train, or on ranks of their own, by the model of cost."""

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
class Layout:
    """How many ranks only generate, 0 where all do both, and the seconds of a step."""

    apart: int
    lag: int
    seconds: float


def with_engines(config: TrainConfig, apart: int, lag: int) -> TrainConfig:
    """The recipe with so many ranks that only generate, and what that needs of it; 0: with none."""
    changed: dict[str, dict[str, Any]] = {
        "engine": {"placement": "ranks" if apart else "shared", "ranks": apart or 1, "replicas": 1},
        "rollout": {"lag": lag},
        "sync": {"way": "auto" if apart else "staged" if placement(config).apart else config.sync.way},
        "policy": {"offload": "none"} if apart else {},
    }
    return config.model_copy(update={key: getattr(config, key).model_copy(update=own) for key, own in changed.items()})


def compared(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> Iterator[Layout]:
    """Colocated, and of either lag the fastest with engines apart; of those that are not refused and fit on `gpu`.

    Of more than a node's ranks, whole nodes generate.
    """
    size = config.engine.tensor_parallel_size
    step = size if ranks <= NODE else max(size, NODE)
    for lag, counts in ((0, [0]), (0, range(step, ranks, step)), (1, range(step, ranks, step))):
        found = [
            Layout(apart, lag, sum(cost.seconds for cost in step_costs(recipe, model, ranks, gpu, lengths)))
            for apart in counts
            for recipe in [with_engines(config, apart, lag)]
            if not any(check_placement(recipe, ranks, min(ranks, NODE)))
            and not any(over_budget(recipe, model, training_ranks(recipe, ranks), gpu.memory_gib))
        ]
        yield from sorted(found, key=lambda layout: layout.seconds)[:1]


def comparison(config: TrainConfig, model: ModelSizes, ranks: int, gpu: Gpu, lengths: Lengths) -> Iterator[str]:
    """Sentences: what a step takes in either layout, and how much faster than the colocated one the other is."""
    found = list(compared(config, model, ranks, gpu, lengths))
    base = next((layout.seconds for layout in found if not layout.apart), None)
    for layout in found:
        apart = f"engine.placement: ranks, engine.ranks: {layout.apart}, rollout.lag: {layout.lag}"
        how = apart if layout.apart else "every rank does both"
        against = ""
        if layout.apart and base is not None:
            change = base / layout.seconds - 1
            against = f", {abs(change):.0%} {'faster' if change >= 0 else 'slower'}"
        yield f"{how}: {layout.seconds:.2f} s a step{against}"
    if not any(layout.apart for layout in found):
        refused = next(check_placement(with_engines(config, config.engine.tensor_parallel_size, 0), ranks, ranks), "")
        yield f"engines apart: {refused or 'they do not fit on these ranks'}"
