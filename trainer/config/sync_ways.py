"""The ways that weights can take to engines on the trainer's devices (`sync.way`): a record for
each.

A record says everything that depends on the way. Which one `auto` stands for is decided by a recipe
and torchrun's variables. To remote engines there is one way alone, a broadcast, which is no
setting.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainer.config.machine import resolve_device
from trainer.config.model_file import REPROCESSED_KEYS, is_multimodal, model_config
from trainer.config.placement import placement
from trainer.config.schema import TrainConfig
from trainer.errors import quoted

Obstacles = Callable[[TrainConfig, int, int], Iterator[str]]


def _no_obstacles(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class WayOfWeights:
    """A way of weights to the engines, with its consequences.

    Attributes: transport: import string of the `sharding.Transport`, whose `for_run` builds it; "":
        a user's class. purpose: tells in an error what the way does. obstacles: yields the reasons,
        in the settings, why it is impossible; takes the recipe, the number of ranks and the number
        on this machine. shares_memory: the policy computes with the engine's weights: it is not
        sharded, and they stay while the engine sleeps. reads_shards: engines read the ranks'
        shards, from the second sync on, and only weights that vLLM re-processes are staged.
        through_files: weights travel whole, and engines read them into memory of their own.
    """

    transport: str = ""
    purpose: str = ""
    obstacles: Obstacles = _no_obstacles
    shares_memory: bool = False
    reads_shards: bool = False
    through_files: bool = False

    @property
    def is_users(self) -> bool:
        """True for a class of the user's."""
        return not self.transport


def way(config: TrainConfig) -> WayOfWeights:
    """Return the record of the recipe's `sync.way`."""
    return WAYS.get(config.sync.way, _USERS)


def chosen_way(config: TrainConfig, ranks: int, neighbours: int) -> tuple[str, str]:
    """Return the way that `sync.way: auto` stands for, the first possible one of zero_copy, pull
    and staged, and why.

    `neighbours` is the number of ranks on a machine.
    """
    if resolve_device(config) == "cuda":
        return "staged", "since it was tried most on GPUs: zero_copy ran on one, pull on none"
    model = model_config(config.model.path)
    unshared = [*WAYS["zero_copy"].obstacles(config, ranks, neighbours)]
    for key, part in REPROCESSED_KEYS.items():
        if model.get(key):
            unshared.append(f"vLLM does not keep the {part} as trained")
    if is_multimodal(config.model.path):
        unshared.append("vLLM shards the weights of some image encoders in another way")
    if not unshared:
        return "zero_copy", "since one rank and its engine keep weights in the same layout"
    unread = next(WAYS["pull"].obstacles(config, ranks, neighbours), None)
    if unread is None:
        return "pull", f"since the engine can read all shards here (not zero_copy: {_fact(unshared[0])})"
    return "staged", f"since engines cannot read shards here: {_fact(unread)}"


def with_chosen_way(config: TrainConfig, ranks: int, neighbours: int) -> tuple[TrainConfig, str]:
    """Return the recipe with `auto` replaced by the chosen way, and a sentence that says which way
    and why.

    The sentence is empty if the recipe names a way, or if engines are on other devices, which have
    only one way.
    """
    if config.sync.way != "auto" or placement(config).remote:
        return config, ""
    name, why = chosen_way(config, ranks, neighbours)
    return _by(config, name), f"sync.way is {name}, {why}"


def with_staged_way(config: TrainConfig) -> TrainConfig:
    """Return the recipe with `auto` replaced by `staged`, for a policy that has to be sharded."""
    return _by(config, "staged") if config.sync.way == "auto" else config


def _by(config: TrainConfig, name: str) -> TrainConfig:
    """Return the recipe with another way."""
    return config.model_copy(update={"sync": config.sync.model_copy(update={"way": name})})


def _fact(obstacle: str) -> str:
    """Return an obstacle without its remedy."""
    return obstacle.partition(": ")[0]


def local_ranks(environ: Mapping[str, str], ranks: int) -> int:
    """Return the number of ranks on this machine: all `ranks`, unless torchrun says otherwise."""
    return int(environ.get("LOCAL_WORLD_SIZE", ranks))


def check_way(config: TrainConfig, ranks: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each reason why the recipe's sync.way is not possible."""
    sync = config.sync
    if sync.delta:
        for reason in _delta_obstacles(config):
            yield f"sync.delta changes the weights that remote engines hold, but {reason}"
    if placement(config).remote:
        if sync.way != "auto":
            where = f"engine.placement is {config.engine.placement}"
            yield (
                f"{where}, but sync.way is {sync.way}, which needs memory that trainer and engine "
                "share: leave it out"
            )
        return
    home = sync.way.rpartition(":")[0]
    if home.endswith(".py") and not os.path.isfile(home):
        yield f"sync.way: {quoted(sync.way)} cannot be loaded: there is no file {home}"
    for reason in way(config).obstacles(config, ranks, local_ranks(environ, ranks)):
        yield f"sync.way: {sync.way} {way(config).purpose}, but {reason}"


def _delta_obstacles(config: TrainConfig) -> Iterator[str]:
    """Yield the reasons why weights cannot be sent as changes of those before."""
    unverified = config.sync.verify == "off"
    small = config.lora.engines_apply
    reasons = {
        "engine.placement is shared, where nothing travels: leave it out": not placement(config).remote,
        "sync.verify is off, and digests have to prove the result: set it to sample": unverified,
        "lora.sync sends a small adapter anyway: leave it out, or set lora.sync to merged": small,
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _zero_copy_obstacles(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    """Yield the reasons, in the settings, why trainer and engine cannot share one memory for
    weights.
    """
    engine = config.engine
    policy = config.policy
    reasons = {
        f"there are {ranks} ranks: start one": ranks > 1,
        "engine.tensor_parallel_size shards them: set it to 1": engine.tensor_parallel_size > 1,
        "policy.backend is deepspeed, which keeps its own: set it to fsdp": policy.backend != "fsdp",
        "lora.rank adds adapters to the weights: set it to 0": config.lora.rank > 0,
        f"engine.dtype is not policy.dtype: set it to {policy.dtype}": engine.dtype
        not in (None, policy.dtype),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _pull_obstacles(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    """Yield the reasons, in the settings, why engines cannot read weights out of the ranks'
    shards.
    """
    policy = config.policy
    deepspeed = policy.backend == "deepspeed"
    size = policy.shard_size or ranks
    reasons = {
        "policy.zero_stage below 3 shards no weights: set it to 3": deepspeed and policy.zero_stage < 3,
        "policy.offload moves weights away in every shift: set it to optimizer": policy.offload == "all",
        "policy.update_on: host keeps them in host memory: set it to device": (
            policy.update_on == "host" and resolve_device(config) == "cuda"
        ),
        "lora.sync sends the adapter by itself: set it to merged": config.lora.engines_apply,
        f"a copy of the model is sharded over {size} ranks, and a machine has {neighbours}: set "
        "policy.shard_size": (neighbours % size > 0),
        **_record_obstacles(config),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _record_obstacles(config: TrainConfig) -> dict[str, bool]:
    """Return the reasons, and whether each holds, why the place of weights in an engine's memory is
    unknown.
    """
    packed = resolve_device(config) == "cpu" and not config.engine.plain_cpu_weights
    unrecorded = not config.sync.replay
    return {
        "engine.plain_cpu_weights is false, so that vLLM packs them: set it to true": packed,
        "sync.replay is false, and only the record says where they are: set it to true": unrecorded,
    }


WAYS = {
    "staged": WayOfWeights("sharding.transports.staged:Staged"),
    "pull": WayOfWeights(
        "sharding.transports.pull:Pull",
        purpose="lets engines read the shards of their machine's ranks",
        obstacles=_pull_obstacles,
        reads_shards=True,
    ),
    "zero_copy": WayOfWeights(
        "sharding.transports.zero_copy:ZeroCopy",
        purpose="shares whole weights between one rank and its engine",
        obstacles=_zero_copy_obstacles,
        shares_memory=True,
    ),
    "storage": WayOfWeights("sharding.remote.storage:Storage", through_files=True),
}
WAYS["auto"] = WAYS["staged"]  # unless `with_chosen_way` finds another one

_USERS = WayOfWeights()
