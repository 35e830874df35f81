"""Whether trainer and engine fit on a device together, told before either is started."""

from collections.abc import Iterator

from trainer.config.placement import placement
from trainer.config.schema import TrainConfig
from trainer.estimates.memory import GIB, engine_parts, trainer_parts
from trainer.estimates.model_sizes import ModelSizes

MARGIN = 1.05
"""By which the sum may exceed the device: it is right to a few per cent."""

_NAMED = 4  # parts, the largest


def over_budget(config: TrainConfig, model: ModelSizes, ranks: int, device_gib: float) -> Iterator[str]:
    """A sentence for each half of a step in which a rank needs more than its device has, with the largest parts.
    `ranks`: those that train.
    """
    trainer, engine = trainer_parts(config, model, ranks, device_gib), engine_parts(config, model, ranks, device_gib)
    crews = [trainer, engine] if placement(config).apart else [[*trainer, *engine]]
    halves = [
        (what, {part.name: getattr(part, half) / GIB for part in parts})
        for parts in crews
        for what, half in (("while answers are generated", "generating"), ("while the policy is updated", "training"))
    ]
    for what, sizes in halves:
        if (total := sum(sizes.values())) > MARGIN * device_gib:
            largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NAMED]
            named = ", ".join(f"{name} {size:.1f}" for name, size in largest if size)
            yield (
                f"{what} a rank needs {total:.1f} GiB, and its device has {device_gib:.1f} ({named}): lower "
                "engine.kv_cache_gib or batch.tokens_per_micro_batch, or use more ranks; hotbunk plan shows all parts"
            )
