"""Which recipes can compute common beginnings of sequences once (`batch.share_prefixes`). No torch is imported."""

from collections.abc import Iterable, Iterator
from typing import Any

from trainer.config.model_file import BRANCHING_LAYERS
from trainer.config.schema import TrainConfig
from trainer.errors import quoted


def check_prefixes(config: TrainConfig, models: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Yields a sentence for each reason why a recipe that asks for it cannot share beginnings.

    `models` are the keys that name the trainer's models, with their config.json. `require_branches` checks a model's
    class once it is built.
    """
    if not config.batch.share_prefixes:
        return
    for obstacle in _obstacles(config, models):
        yield f"batch.share_prefixes is true, but {obstacle}: set it to false"


def _obstacles(config: TrainConfig, models: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    if not config.batch.packing:
        yield "batch.packing is false, which pads whole sequences"
    if config.policy.backend != "fsdp":
        yield f"policy.backend is {config.policy.backend}, with which it is untested"
    if (attention := config.model.attn_implementation) != "sdpa":
        yield f"model.attn_implementation is {quoted(attention)}, which does not take paths of a tree"
    if config.data.max_images and config.model.routes == "engine":
        yield "images may have other routes from answer to answer (data.max_images, model.routes)"
    for name, model in models:
        if unfit := sorted(set(model.get("layer_types") or ()) - set(BRANCHING_LAYERS)):
            yield f"{name} has layers ({', '.join(unfit)}) whose state at a branch no branch would get"
        if dropped := [key for key, share in model.items() if key.endswith(("dropout", "_pdrop")) and share]:
            yield f"{name} has {dropped[0]}, which would drop the same for all answers to a prompt"
