"""The placements of engines (`engine.placement`): three records that say everything that depends on
the placement.

An engine shares the devices of ranks that train, in shifts (`shared`); or the last ranks of the run
only generate, with engines on their own devices (`ranks`); or one last rank, without a device,
holds engines in actors of Ray (`ray`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.config.schema import EngineConfig, TrainConfig

Problems = Callable[[TrainConfig, int, int], Iterator[str]]


@dataclass(frozen=True)
class Placement:
    """A placement of engines, with its consequences.

    Attributes: problems: yields a sentence for each setting of a recipe that does not work with the
        placement; takes the recipe, the number of ranks of the run and the number on this machine.
        generating: number of ranks, the last of the run, that only generate; all others train.
        workers: number of workers of all engines together; takes the engine's section and the
        number of ranks. engine_ranks: number of consecutive ranks that make up one engine, the
        first of which leads it. number: the key beside engine.placement that says how many; None:
        there is none. remote: engines are on other devices than the trainer's: they never sleep,
        weights and orders travel to them, and their answers travel to the ranks that train. actors:
        engines are replicas in actors of Ray, and the rank that holds them has no device.
    """

    problems: Problems
    generating: Callable[[EngineConfig], int]
    workers: Callable[[EngineConfig, int], int]
    engine_ranks: Callable[[EngineConfig], int] = lambda engine: engine.tensor_parallel_size
    number: str | None = None
    remote: bool = True
    actors: bool = False


def placement(config: TrainConfig) -> Placement:
    """Return the record of the recipe's engine.placement."""
    return PLACEMENTS[config.engine.placement]


def generating_ranks(config: TrainConfig) -> int:
    """Return the number of ranks that only generate, which are the last of the run."""
    return placement(config).generating(config.engine)


def training_ranks(config: TrainConfig, ranks: int) -> int:
    """Return the number of ranks that train, out of all `ranks` of the run."""
    return ranks - generating_ranks(config)


def engine_workers(config: TrainConfig, ranks: int) -> int:
    """Return the number of workers of all engines together, in a run of `ranks` ranks."""
    return placement(config).workers(config.engine, ranks)


def leads_engine(config: TrainConfig, number: int, ranks: int) -> bool:
    """Return True if rank `number` of the run's `ranks` is the first rank of an engine."""
    record = placement(config)
    generating = number - training_ranks(config, ranks) if record.remote else number
    return generating >= 0 and generating % record.engine_ranks(config.engine) == 0


def check_placement(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    """Yield a sentence, with keys and remedy, for each setting that does not work with the
    placement.

    Args:
        config: the recipe.
        ranks: number of ranks of the run.
        neighbours: number of the ranks on this machine.
    """
    chosen = placement(config)
    for name, other in PLACEMENTS.items():
        key = other.number
        if other is chosen or not key:
            continue
        value = getattr(config.engine, key)
        if value > 1:
            yield (
                f"engine.{key} is {value}, but engine.placement is not {name}: set it, or leave {key} "
                "out"
            )
    yield from chosen.problems(config, ranks, neighbours)


def _shared_problems(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    size = config.engine.tensor_parallel_size
    if neighbours % size:
        what = "the number of ranks"
        if neighbours != ranks:
            what = "the ranks of one machine (LOCAL_WORLD_SIZE)"
        yield f"{what} = {neighbours} must be divisible by engine.tensor_parallel_size ({size})"
    if config.rollout.lag:
        yield (
            "rollout.lag is 1, but engines sleep while the policy learns: set engine.placement, or "
            "leave lag out"
        )


def _ranks_problems(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    generating = config.engine.ranks
    size = config.engine.tensor_parallel_size
    if generating >= ranks:
        yield (
            f"engine.ranks is {generating}, but the run has {ranks} ranks, and at least one must "
            "train: start more"
        )
    if generating % size or neighbours % size or (neighbours != ranks and (ranks - generating) % size):
        yield (
            f"engine.ranks = {generating} of {ranks} ranks, {neighbours} on a machine, cannot form "
            f"engines of engine.tensor_parallel_size = {size} ranks on one machine each: change one of "
            "them"
        )
    yield from _remote_problems(config)


def _ray_problems(config: TrainConfig, ranks: int, neighbours: int) -> Iterator[str]:
    if ranks < 2:
        yield (
            "engine.placement is ray, but the run has 1 rank, which must train: start one more, to "
            "hold the engines"
        )
    if find_spec("ray") is None:
        yield "engine.placement is ray, which is not installed: pip install ray"
    elif config.data.max_images:
        yield (
            "engine.placement is ray, but data.max_images is set, and images do not go to actors: set "
            "it to ranks"
        )
    yield from _remote_problems(config)


def _remote_problems(config: TrainConfig) -> Iterator[str]:
    policy = config.policy
    rollout = config.rollout
    setting = f"engine.placement is {config.engine.placement}"
    if policy.offload != "none":
        yield (
            f"{setting}, but policy.offload is {policy.offload}, and no engine needs the memory: leave "
            "it out"
        )
    if rollout.lag and config.algorithm.tis_cap is None and config.algorithm.keep_band is None:
        yield (
            "rollout.lag lets old weights sample, but algorithm.tis_cap is null: set it, or "
            "algorithm.keep_band"
        )


PLACEMENTS = {
    "shared": Placement(
        _shared_problems, generating=lambda engine: 0, workers=lambda engine, ranks: ranks, remote=False
    ),
    "ranks": Placement(
        _ranks_problems,
        generating=lambda engine: engine.ranks,
        workers=lambda engine, ranks: engine.ranks,
        number="ranks",
    ),
    "ray": Placement(
        _ray_problems,
        generating=lambda engine: 1,
        workers=lambda engine, ranks: engine.replicas * engine.tensor_parallel_size,
        engine_ranks=lambda engine: 1,
        number="replicas",
        actors=True,
    ),
}
