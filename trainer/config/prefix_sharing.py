"""Decide whether a recipe can compute common beginnings of sequences once (`batch.share_prefixes`),
without torch.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from trainer.config.model_file import PACKABLE_LAYERS
from trainer.config.schema import TrainConfig
from trainer.errors import quoted

Models = Iterable[tuple[str, dict[str, Any]]]
"""The keys that name the trainer's models, with their config.json."""


def check_prefixes(config: TrainConfig, models: Models) -> Iterator[str]:
    """Yield a sentence for each reason why a recipe that asks for it cannot share beginnings.

    `trainer.model_checks.check_model` checks the models' classes once they are built.
    """
    if config.batch.share_prefixes is True:
        for obstacle in _obstacles(config, models):
            yield f"batch.share_prefixes is true, but {obstacle}: set it to false or auto"


def with_chosen_prefixes(
    config: TrainConfig, models: Models, classes: Iterable[str] = ()
) -> tuple[TrainConfig, str]:
    """Return the recipe with `batch.share_prefixes: auto` replaced, and a sentence that says why if
    it is by false.

    The sentence is empty if beginnings are shared, or if the recipe says whether they are.
    `classes` are the obstacles in the models' classes, if they are built.
    """
    if config.batch.share_prefixes != "auto":
        return config, ""
    obstacle = next(chain(_obstacles(config, models), classes), None)
    batch = config.batch.model_copy(update={"share_prefixes": obstacle is None})
    why = f"prefixes are computed for each answer, since {obstacle}" if obstacle else ""
    return config.model_copy(update={"batch": batch}), why


def _obstacles(config: TrainConfig, models: Models) -> Iterator[str]:
    """Yield the reasons, in the settings and in config.json, why beginnings cannot be shared."""
    if not config.batch.packing:
        yield "batch.packing is false, which pads whole sequences"
    if config.policy.backend != "fsdp":
        yield f"policy.backend is {config.policy.backend}, with which it is untested"
    if (attention := config.model.attn_implementation) != "sdpa":
        yield f"model.attn_implementation is {quoted(attention)}, which does not take paths of a tree"
    if config.data.max_images and config.model.routes == "engine":
        yield "images may have other routes from answer to answer (data.max_images, model.routes)"
    for name, model in models:
        if unfit := sorted(set(model.get("layer_types") or ()) - set(PACKABLE_LAYERS)):
            yield f"{name} has layers ({', '.join(unfit)}) of which it is not known what they hand on"
        dropout = [key for key in model if key.endswith(("dropout", "_pdrop"))]
        dropped = [key for key in dropout if model[key]]
        if dropped:
            yield f"{name} has {dropped[0]}, which would drop the same for all answers to a prompt"
