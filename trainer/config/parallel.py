"""Decide whether a recipe can divide the model, its experts and its sequences over its ranks,
without torch.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from trainer.config.model_file import EXPERT_KEYS, SHARED_LAYERS
from trainer.config.schema import TrainConfig
from trainer.errors import quoted

RANKS = "the number of ranks"


def check_parallel(
    config: TrainConfig, ranks: int, models: Iterable[tuple[str, dict[str, Any]]]
) -> Iterator[str]:
    """Check what the recipe and config.json say; `trainer.model_checks.check_model` later checks
    the models' classes.

    `models` are the keys that name the trainer's models, with their config.json.
    """
    policy = config.policy
    named = list(models)
    if policy.shard_size is not None:
        yield from check_divides(RANKS, ranks, "policy.shard_size", policy.shard_size)
    if policy.sequence_parallel > 1:
        yield from _check_sequences(config, ranks, named)
    if policy.expert_parallel > 1:
        yield from _check_experts(config, ranks, named)


def check_divides(key: str, value: int, what: str, divisor: int) -> Iterator[str]:
    """Yield a sentence if the value of `key` is not divisible by that of `what`."""
    if value % divisor:
        yield f"{key} = {value} must be divisible by {what} ({divisor})"


def _check_sequences(
    config: TrainConfig, ranks: int, models: list[tuple[str, dict[str, Any]]]
) -> Iterator[str]:
    key = "policy.sequence_parallel"
    ways = config.policy.sequence_parallel
    yield from check_divides(RANKS, ranks, key, ways)
    if not config.batch.packing:
        yield (
            f"{key} is {ways}, but only sequences without padding can be cut: set batch.packing to true"
        )
    if (attention := config.model.attn_implementation) != "sdpa":
        yield f"{key} is {ways}, but model.attn_implementation is {quoted(attention)}: set it to sdpa"
    for name, model in models:
        if heads := model.get("num_attention_heads"):
            yield from check_divides(f"num_attention_heads of {name}", heads, key, ways)
        if unpackable := sorted(set(model.get("layer_types") or ()) - set(SHARED_LAYERS)):
            yield (
                f"{key} is {ways}, but {name} has layers ({', '.join(unpackable)}) that need all "
                "tokens: set it to 1"
            )


def _check_experts(
    config: TrainConfig, ranks: int, models: list[tuple[str, dict[str, Any]]]
) -> Iterator[str]:
    key = "policy.expert_parallel"
    size = config.policy.expert_parallel
    shards = config.policy.shard_size
    yield from check_divides(*("policy.shard_size", shards) if shards else (RANKS, ranks), key, size)
    for name, model in models:
        if experts := next(filter(None, map(model.get, EXPERT_KEYS)), 0):
            yield from check_divides(f"the number of experts of {name}", experts, key, size)
        elif name == "model.path":
            yield f"{key} is {size}, but {config.model.path} is not a mixture of experts: set it to 1"
