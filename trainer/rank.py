"""Entry point of a rank, which either trains, with its engine and the policy taking turns, or only
generates.
"""

import os
from contextlib import ExitStack

from generation.engine.vllm_compat import fork_engines
from sharding.ranks import EVERYBODY, rank, world_size
from trainer.build import joined
from trainer.config.machine import resolve_device
from trainer.config.placement import leads_engine, placement, training_ranks
from trainer.config.schema import TrainConfig
from trainer.generator import generate
from trainer.loop import RLTrainer
from trainer.run.lock import RunLock


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """Run one rank: join the other ranks, train or generate, and leave with them. A failed rank
    ends all ranks.
    """
    number = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    forks = (
        resolve_device(config) == "cpu"
        and leads_engine(config, number, ranks)
        and not placement(config).actors
    )
    stop_forking = fork_engines() if forks else lambda: None
    with joined(config, lock) as watchdog, ExitStack() as resources:
        resources.callback(stop_forking)
        trains = rank(EVERYBODY) < training_ranks(config, world_size(EVERYBODY))
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            if trains:
                run = RLTrainer(config, watchdog, resources).train
            else:
                run = generate(config, watchdog, resources)
        run()
