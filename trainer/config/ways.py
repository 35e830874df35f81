"""Which ways the weights can take to the engines (`sync.way`), as far as a recipe and torchrun's variables tell."""

import os
from collections.abc import Iterator, Mapping

from trainer.config.machine import resolve_device
from trainer.config.model_file import REPROCESSED_KEYS, model_config, sees
from trainer.config.placement import placement
from trainer.config.schema import TrainConfig
from trainer.errors import shown


def chosen_way(config: TrainConfig, ranks: int, neighbours: int) -> tuple[str, str]:
    """The way that `sync.way: auto` stands for: the first that holds of zero_copy, pull and staged; and why that.
    `neighbours`: the ranks of a machine.
    """
    if resolve_device(config) == "cuda":
        return "staged", "since no other has run on a GPU yet"
    model = model_config(config.model.path)
    apart = [f"vLLM does not keep the {what} as trained" for key, what in REPROCESSED_KEYS.items() if model.get(key)]
    apart += ["vLLM cuts the weights of some encoders of images otherwise"] * sees(config.model.path)
    shared = next(iter([*zero_copy_obstacles(config, ranks), *apart]), None)
    if shared is None:
        return "zero_copy", "since one rank and its engine keep weights alike"
    pulled = next(pull_obstacles(config, ranks, neighbours), None)
    if pulled is None:
        return "pull", f"since the engine can read all shards here (not zero_copy: {_fact(shared)})"
    return "staged", f"since engines cannot read shards here: {_fact(pulled)}"


def settled(config: TrainConfig, ranks: int, neighbours: int) -> tuple[TrainConfig, str]:
    """The recipe with a way in the place of `auto`, and a sentence that says which and why; "" where one was named, or
    engines are apart: then there is only one.
    """
    if config.sync.way != "auto" or placement(config).apart:
        return config, ""
    way, why = chosen_way(config, ranks, neighbours)
    settled = config.model_copy(update={"sync": config.sync.model_copy(update={"way": way})})
    return settled, f"sync.way is {way}, {why}"


def _fact(obstacle: str) -> str:
    """An obstacle without its remedy."""
    return obstacle.partition(": ")[0]


def local_ranks(environ: Mapping[str, str], ranks: int) -> int:
    """The ranks of this machine: all `ranks`, unless torchrun says otherwise."""
    return int(environ.get("LOCAL_WORLD_SIZE", ranks))


def check_way(config: TrainConfig, ranks: int, environ: Mapping[str, str]) -> Iterator[str]:
    """What must hold for trainer or engine to use the other's memory."""
    sync = config.sync
    if placement(config).apart:  # `check_placement` has the rest
        return
    if (home := sync.way.rpartition(":")[0]).endswith(".py") and not os.path.isfile(home):
        yield f"sync.way: {shown(sync.way)} cannot be loaded: there is no file {home}"
    if sync.way == "zero_copy":
        for reason in zero_copy_obstacles(config, ranks):
            yield f"sync.way: zero_copy shares whole weights between one rank and its engine, but {reason}"
    if sync.way == "pull":
        for reason in pull_obstacles(config, ranks, local_ranks(environ, ranks)):
            yield f"sync.way: pull lets engines read the shards of their machine's ranks, but {reason}"


def zero_copy_obstacles(config: TrainConfig, ranks: int) -> Iterator[str]:
    """Why trainer and engine cannot have one memory for one layout of weights, as far as settings tell."""
    engine, policy = config.engine, config.policy
    reasons = {
        f"there are {ranks} ranks: start one": ranks > 1,
        "engine.tensor_parallel_size cuts them: set it to 1": engine.tensor_parallel_size > 1,
        "policy.backend is deepspeed, which has its own: set it to fsdp": policy.backend != "fsdp",
        "lora.rank adds adapters to them: set it to 0": config.lora.rank > 0,
        f"engine.dtype is not policy.dtype: set it to {policy.dtype}": engine.dtype not in (None, policy.dtype),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def pull_obstacles(config: TrainConfig, ranks: int, local_ranks: int) -> Iterator[str]:
    """Why engines cannot read weights out of the ranks' shards, as far as settings tell."""
    policy = config.policy
    deepspeed, size = policy.backend == "deepspeed", policy.shard_size or ranks
    reasons = {
        "policy.zero_stage below 3 cuts no weights: set it to 3": deepspeed and policy.zero_stage < 3,
        "policy.offload moves them away in every shift: set it to optimizer": policy.offload == "all",
        "lora.sync sends the adapter by itself: set it to merged": config.lora.engines_apply,
        f"a copy of the model is cut over {size} ranks, and a machine has {local_ranks}: set policy.shard_size": (
            local_ranks % size > 0
        ),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _record_obstacles(config: TrainConfig) -> dict[str, bool]:
    """Why it is not known where in an engine's memory weights belong."""
    packed = resolve_device(config) == "cpu" and not config.engine.plain_cpu_weights
    return {
        "engine.plain_cpu_weights is false, so that vLLM packs them: set it to true": packed,
        "sync.replay is false, and only the record tells where they are: set it to true": not config.sync.replay,
    }
