"""The ways that weights can take to the engines (`sync.way`), decided by a recipe and torchrun's variables."""

import os
from collections.abc import Iterator, Mapping

from trainer.config.machine import resolve_device
from trainer.config.model_file import REPROCESSED_KEYS, is_multimodal, model_config
from trainer.config.placement import placement
from trainer.config.schema import TrainConfig
from trainer.errors import quoted


def chosen_way(config: TrainConfig, ranks: int, neighbours: int) -> tuple[str, str]:
    """The way that `sync.way: auto` stands for, the first possible one of zero_copy, pull and staged, and the reason.

    `neighbours` is the number of ranks on a machine.
    """
    if resolve_device(config) == "cuda":
        return "staged", "since it was tried most on GPUs: zero_copy ran on one, pull on none"
    model = model_config(config.model.path)
    apart = [f"vLLM does not keep the {what} as trained" for key, what in REPROCESSED_KEYS.items() if model.get(key)]
    apart += ["vLLM shards the weights of some image encoders in another way"] * is_multimodal(config.model.path)
    shared = next(iter([*zero_copy_obstacles(config, ranks), *apart]), None)
    if shared is None:
        return "zero_copy", "since one rank and its engine keep weights in the same layout"
    pulled = next(pull_obstacles(config, ranks, neighbours), None)
    if pulled is None:
        return "pull", f"since the engine can read all shards here (not zero_copy: {_fact(shared)})"
    return "staged", f"since engines cannot read shards here: {_fact(pulled)}"


def with_chosen_way(config: TrainConfig, ranks: int, neighbours: int) -> tuple[TrainConfig, str]:
    """The recipe with `auto` replaced by the chosen way, and a sentence that says which way and why.

    The sentence is empty if the recipe names a way, or if engines are on other devices, which have only one way.
    """
    if config.sync.way != "auto" or placement(config).apart:
        return config, ""
    way, why = chosen_way(config, ranks, neighbours)
    changed = config.model_copy(update={"sync": config.sync.model_copy(update={"way": way})})
    return changed, f"sync.way is {way}, {why}"


def _fact(obstacle: str) -> str:
    """An obstacle without its remedy."""
    return obstacle.partition(": ")[0]


def local_ranks(environ: Mapping[str, str], ranks: int) -> int:
    """The number of ranks on this machine: all `ranks`, unless torchrun says otherwise."""
    return int(environ.get("LOCAL_WORLD_SIZE", ranks))


def check_way(config: TrainConfig, ranks: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each reason why the recipe's sync.way is not possible."""
    sync = config.sync
    if sync.delta:
        for reason in _delta_obstacles(config):
            yield f"sync.delta changes the weights that engines elsewhere hold, but {reason}"
    if placement(config).apart:  # `check_placement` has the rest
        return
    if (home := sync.way.rpartition(":")[0]).endswith(".py") and not os.path.isfile(home):
        yield f"sync.way: {quoted(sync.way)} cannot be loaded: there is no file {home}"
    if sync.way == "zero_copy":
        for reason in zero_copy_obstacles(config, ranks):
            yield f"sync.way: zero_copy shares whole weights between one rank and its engine, but {reason}"
    if sync.way == "pull":
        for reason in pull_obstacles(config, ranks, local_ranks(environ, ranks)):
            yield f"sync.way: pull lets engines read the shards of their machine's ranks, but {reason}"


def _delta_obstacles(config: TrainConfig) -> Iterator[str]:
    """Yields the reasons why weights cannot be sent as changes of those before."""
    reasons = {
        "engine.placement is shared, where nothing travels: leave it out": not placement(config).apart,
        "sync.verify is off, and digests have to prove the result: set it to sample": config.sync.verify == "off",
        "lora.sync sends a small adapter anyway: leave it out, or set lora.sync to merged": config.lora.engines_apply,
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def zero_copy_obstacles(config: TrainConfig, ranks: int) -> Iterator[str]:
    """Yields the reasons, in the settings, why trainer and engine cannot share one memory for weights."""
    engine, policy = config.engine, config.policy
    reasons = {
        f"there are {ranks} ranks: start one": ranks > 1,
        "engine.tensor_parallel_size shards them: set it to 1": engine.tensor_parallel_size > 1,
        "policy.backend is deepspeed, which keeps its own: set it to fsdp": policy.backend != "fsdp",
        "lora.rank adds adapters to the weights: set it to 0": config.lora.rank > 0,
        f"engine.dtype is not policy.dtype: set it to {policy.dtype}": engine.dtype not in (None, policy.dtype),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def pull_obstacles(config: TrainConfig, ranks: int, local_ranks: int) -> Iterator[str]:
    """Yields the reasons, in the settings, why engines cannot read weights out of the ranks' shards."""
    policy = config.policy
    deepspeed, size = policy.backend == "deepspeed", policy.shard_size or ranks
    reasons = {
        "policy.zero_stage below 3 shards no weights: set it to 3": deepspeed and policy.zero_stage < 3,
        "policy.offload moves weights away in every shift: set it to optimizer": policy.offload == "all",
        "policy.update_on: host keeps them in host memory: set it to device": (
            policy.update_on == "host" and resolve_device(config) == "cuda"
        ),
        "lora.sync sends the adapter by itself: set it to merged": config.lora.engines_apply,
        f"a copy of the model is sharded over {size} ranks, and a machine has {local_ranks}: set policy.shard_size": (
            local_ranks % size > 0
        ),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _record_obstacles(config: TrainConfig) -> dict[str, bool]:
    """The reasons, and whether each holds, why the place of weights in an engine's memory is unknown."""
    packed = resolve_device(config) == "cpu" and not config.engine.plain_cpu_weights
    return {
        "engine.plain_cpu_weights is false, so that vLLM packs them: set it to true": packed,
        "sync.replay is false, and only the record says where they are: set it to true": not config.sync.replay,
    }
