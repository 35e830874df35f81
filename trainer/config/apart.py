"""Engines apart (`engine.apart`): which ranks train and which generate, and what does not go with it."""

from collections.abc import Iterator

from trainer.config.schema import TrainConfig


def training_ranks(config: TrainConfig, ranks: int) -> int:
    """Of so many ranks those that train."""
    return ranks - config.engine.apart


def engine_ranks(config: TrainConfig, ranks: int) -> int:
    """Of so many ranks those that generate."""
    return config.engine.apart or ranks


def check_apart(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    """A sentence, with the keys and the remedy, for all that does not go together. `neighbours`: ranks of a machine."""
    apart, size, rollout = config.engine.apart, config.engine.tensor_parallel_size, config.rollout
    if not apart:
        if rollout.lag:
            yield "rollout.lag is 1, but engines sleep while the policy learns: set engine.apart, or leave it out"
        return
    if apart >= ranks:
        yield f"engine.apart is {apart}, but there are {ranks} ranks, of which at least one has to train: start more"
    if apart % size or neighbours % size or (neighbours != ranks and (ranks - apart) % size):
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
