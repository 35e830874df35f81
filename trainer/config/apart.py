"""Engines apart (`engine.apart`): which ranks train and which generate, and what does not go with it."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config.schema import TrainConfig


def apart_ranks(config: TrainConfig) -> int:
    """Ranks that generate and do nothing else."""
    return 1 if config.engine.apart == "ray" else config.engine.apart


def training_ranks(config: TrainConfig, ranks: int) -> int:
    """Of so many ranks those that train."""
    return ranks - apart_ranks(config)


def engine_workers(config: TrainConfig, ranks: int) -> int:
    """Workers of all engines of so many ranks."""
    if config.engine.apart == "ray":
        return config.engine.replicas * config.engine.tensor_parallel_size
    return config.engine.apart or ranks


def check_apart(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    """A sentence, with the keys and the remedy, for all that does not go together. `neighbours`: ranks of a machine."""
    apart, size, rollout = apart_ranks(config), config.engine.tensor_parallel_size, config.rollout
    ray = config.engine.apart == "ray"
    if config.engine.replicas > 1 and not ray:
        yield f"engine.replicas is {config.engine.replicas}, but engine.apart is not ray: set it, or leave replicas out"
    if not apart:
        if rollout.lag:
            yield "rollout.lag is 1, but engines sleep while the policy learns: set engine.apart, or leave it out"
        return
    if apart >= ranks:
        own = config.engine.apart
        yield f"engine.apart is {own}, but there are {ranks} ranks, of which at least one has to train: start more"
    if ray and find_spec("ray") is None:
        yield "engine.apart is ray, which is not installed: pip install ray"
    elif ray and config.data.max_images:
        yield "engine.apart is ray, but data.max_images is set, and images do not go to actors: set a number of ranks"
    elif ray:
        pass
    elif apart % size or neighbours % size or (neighbours != ranks and (ranks - apart) % size):
        yield (
            f"engine.apart = {apart} of {ranks} ranks, {neighbours} on a machine, cannot be engines of "
            f"engine.tensor_parallel_size = {size} that each have one machine: change one of them"
        )
    policy, sync = config.policy, config.sync
    clashes = {
        f"sync.way is {sync.way}, which takes memory that both can reach: leave it out": (
            sync.way not in ("auto", "broadcast")
        ),
        f"policy.offload is {policy.offload}, but there is nothing to make room for: leave it out": (
            policy.offload != "none"
        ),
        "checkpoint.rollouts is set, which keeps answers of the same ranks only: leave it out": (
            config.checkpoint.rollouts
        ),
        "model.routes is engine, which are handed over within the same ranks only: set it to own or recorded": (
            config.model.routes == "engine"
        ),
    }
    yield from (f"engine.apart is set, but {reason}" for reason, holds in clashes.items() if holds)
    if rollout.lag and config.algorithm.tis_cap is None and config.algorithm.keep_band is None:
        yield ("rollout.lag lets old weights sample, but algorithm.tis_cap is null: set it, or algorithm.keep_band")
