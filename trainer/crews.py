"""Who does what: every rank trains and generates in turns, or some do the one and the others the other."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from generation.engine import forkserver
from generation.engine.sampling import NotFiniteError
from generation.engine.vllm_compat import fork_engines
from sharding.ranks import EVERYBODY, RemoteError, rank, world_size
from trainer.apart import GIVEN_UP, Handed, OwnRounds, hand_over
from trainer.build import build_rollouts, build_trainers, joined, rank_device
from trainer.config.machine import resolve_device
from trainer.config.placement import leads_engine, placement, training_ranks
from trainer.config.schema import TrainConfig
from trainer.evaluation import random_states_kept, sample_held_out
from trainer.loop import RLTrainer
from trainer.rollouts import RolloutLevel, StepAbandoned
from trainer.run import processes
from trainer.run.keeper import Identity
from trainer.run.lock import RunLock
from trainer.run.meters import PhaseMeter


def main(config: TrainConfig, lock: RunLock | None = None) -> None:
    """One rank from start to end: join the others, train, leave with them. A failure on one rank ends all."""
    number, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if resolve_device(config) == "cpu" and leads_engine(config, number, ranks) and not placement(config).actors:
        fork_engines()
    # The watchdog keeps the deadlines of steps; collectives only have to outlast the longest of them.
    longest = max(config.run.first_step_deadline_s, config.run.step_deadline_s)
    with joined(config, longest, lock) as watchdog, ExitStack() as resources:
        resources.callback(forkserver.stop)
        generates = rank(EVERYBODY) >= training_ranks(config, world_size(EVERYBODY))
        with watchdog.phase("start-up", config.run.first_step_deadline_s):
            trainer = (EngineCrew if generates else RLTrainer)(config, watchdog, resources)
        trainer.train()


class EngineCrew(RLTrainer):
    """A rank that only generates: it has no policy, and samples or evaluates when the ranks that train say so."""

    def build(self, resources: ExitStack, level: RolloutLevel, start: Path | None, identity: Identity) -> None:
        """This rank's end of the weights' way, and its rollouts."""
        config = self.config
        self.training = training_ranks(config, world_size(EVERYBODY))
        self.trainers = build_trainers(config, self.leader)
        options: dict[str, Any] = {"start": start, "identity": identity}
        self.rollouts = build_rollouts(config, self.leader, self.tokenizer, self.rewards, level, **options)
        resources.callback(self.rollouts.close)
        deadline = config.run.first_step_deadline_s
        self.meter = PhaseMeter(rank_device(config), self.leader, self.watchdog, deadline)
        self.told = -1  # the version that the order of the moment is for
        self.trainers.connect()

    @property
    def version(self) -> int:
        """See `RLTrainer`: engines are asked for answers of these weights, and refuse where they have others."""
        return self.told

    def late_to_leave(self) -> bool:
        """See `RLTrainer`. With a lag never: a checkpoint has to have the answers, as their weights will be gone."""
        called_for = self.watchdog.called_for()
        return not self.config.rollout.lag and called_for > self.config.checkpoint.grace_s / 2

    def train(self) -> None:
        """Carry out orders until there are no more."""
        config = self.config
        if grace := config.checkpoint.grace_s:
            processes.hold_signals(grace, self.watchdog.call_all)
        deadline = config.run.first_step_deadline_s
        while (order := self.next_order())["kind"] != "end":
            with self.watchdog.phase(f"{order['kind']} {abs(order['step'])}", deadline):
                self.carry_out(order)
        if order["failed"]:
            if self.watchdog.called_at is not None:
                processes.interrupt_now()
            raise RemoteError("the ranks that train have ended; what they said is above")

    def next_order(self) -> dict[str, Any]:
        """Waits for as long as the ranks that train may take for a step, and their start or end."""
        with self.watchdog.phase("waiting for weights", 2 * self.config.run.first_step_deadline_s):
            return self.trainers.hear()

    def carry_out(self, order: dict[str, Any]) -> None:
        """Sample or evaluate with the weights that follow, and hand over what came of it."""
        self.trainers.receive(order["version"])
        self.told, self.state.prompts = order["version"], order["prompts"]
        work: Callable[[int], object] = self.sample if order["kind"] == "sample" else self.sample_held_outs
        word, failure = "", None
        try:
            work(order["step"])
        except StepAbandoned:
            word = GIVEN_UP
        except NotFiniteError as error:
            word = str(error)
        except Exception as error:
            failure = error
        self.meter.take()
        assert isinstance(self.rollouts, OwnRounds)
        done = not word and failure is None
        hand_over(self.training, self.rollouts.handed(self.told) if done else Handed(word), failure)

    def sample_held_outs(self, step: int) -> None:
        """Answers to all held-out prompts; see `RLTrainer.evaluate`."""
        with random_states_kept():
            for held_out in self.held_outs:
                with self.meter.phase("eval"):
                    sample_held_out(self.config, self.rollouts, held_out, version=self.version, step=step)
