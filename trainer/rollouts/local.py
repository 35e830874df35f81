"""The source of answers of a rank in whose crew engines run, which sample and score the answers of
an order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import RolloutSettings
from sharding.ranks import EVERYBODY, rank
from trainer.config.schema import TrainConfig
from trainer.data import PromptDataset
from trainer.learning.answers import Answer, gather_answers
from trainer.rollouts.pool import EpisodePool, Pool, Terms
from trainer.rollouts.round import Order, Round, packed, sampled_round
from trainer.rollouts.step_batch import StepBatch
from trainer.run.checkpoint import random_states, restore_random_states


@dataclass(frozen=True)
class HeldOut:
    """A dataset to evaluate on, with its sampling settings.

    Attributes:
        samples: number of answers for each prompt.
    """

    name: str
    prompts: PromptDataset
    sampling: SamplingSettings
    samples: int


class LocalSource:
    """The `Source` that samples steps and evaluations on the engines of this rank's crew."""

    def __init__(
        self,
        config: TrainConfig,
        engines: Pool,
        pool: EpisodePool,
        dataset: PromptDataset,
        sampling: SamplingSettings,
        held_outs: Sequence[HeldOut] = (),
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sample evaluations on `engines`, and take the groups of steps from `pool`, which has the
        same engines.

        Args:
            dataset: the training prompts.
            sampling: their sampling settings.
            held_outs: the datasets of an evaluation.
            give_up: polled during a step; True abandons the step, since the run was asked to end.
        """
        self._config = config
        self._engines = engines
        self._pool = pool
        self._dataset = dataset
        self._sampling = sampling
        self._held_outs = held_outs
        self._give_up = give_up
        self._version = 0  # of the policy in the latest step

    @property
    def finished(self) -> int:
        """The number of answers in this round that this rank's engine has finished."""
        return self._engines.finished

    def produce(self, order: Order) -> StepBatch:
        """Sample a step, as `Source.produce`, round by round until the algorithm has enough
        groups.
        """
        self.take_back(order.step)
        self._version = order.version
        batch = StepBatch(self._config, self._dataset)
        deadline = self._config.run.first_step_deadline_s
        terms = Terms(deadline, self._give_up, details=self._config.algorithm.rewards_apart)
        position = order.position
        while batch.missing:
            settings = self._settings(order, batch.seed(order.step))
            batch.add(self._pool.take(position, batch.missing, settings, terms))
            position = batch.position
        return batch

    def _settings(self, order: Order, seed: int) -> RolloutSettings:
        return RolloutSettings(
            self._config.algorithm.group_size,
            self._sampling,
            order.version,
            seed,
            order.step,
            chat_template_kwargs=self._config.data.chat_template_kwargs,
        )

    def evaluate(self, order: Order) -> list[Round]:
        """Sample an evaluation, as `Source.evaluate`."""
        rounds = []
        with random_states_kept():
            for held_out in self._held_outs:
                answers = sample_held_out(
                    self._config, self._engines, held_out, version=order.version, step=order.step
                )
                rounds.append(sampled_round(answers, order.step, order.version, (), order.position))
        return rounds

    def replayed(self, order: Order, rounds: list[Round], ahead: bool) -> StepBatch:
        """Return the batch of kept rounds: sampling does not depend on earlier ones, as slices
        exclude a journal.
        """
        return StepBatch.of(rounds, order, self._config, self._dataset)

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, as `Source.take_back`."""
        self._pool.take_back(step)

    def add_state(self, last: Round, random_states: str) -> None:
        """Add random states, unfinished groups and untrained answers of this rank to a step's last
        round.
        """
        last.random_states = {rank(EVERYBODY): random_states}
        last.untrained = self._pool.present()
        last.groups = self._pool.groups()

    def carried(self) -> bytes:
        """Pack the groups of this rank's engine that continue after the last step; b"" if there are
        none.
        """
        groups = self._pool.groups()
        return packed([Round(groups=groups)]) if groups else b""

    def untrained(self) -> list[Answer]:
        """Return a few waiting or unfinished answers of all engines, as `Source.untrained`."""
        return gather_answers(self._pool.present(), version=self._version)

    def waits_for(self) -> str:
        """Say what a slow rollout is waiting for, as `Source.waits_for`."""
        return self._pool.waits_for()

    def close(self) -> None:
        """End the episodes under way, their servers and processes. Call it before the engine
        stops.
        """
        self._pool.close()


def sample_held_out(
    config: TrainConfig, pool: Pool, held_out: HeldOut, version: int = 0, step: int = -1
) -> list[Answer]:
    """Sample and score a dataset's prompts on all engines; return answers with details and votes.
    Collective.

    The engines have the weights of `version`. `step` selects the samples' seeds: -1 before a run's
    first step, and one less after each further step.
    """
    seed = config.run.seed
    extra = config.data.chat_template_kwargs
    settings = RolloutSettings(
        held_out.samples,
        held_out.sampling,
        version,
        seed,
        step,
        chat_template_kwargs=extra,
        evaluation=True,
    )
    terms = Terms(config.run.first_step_deadline_s, details=True)
    return pool.run(list(held_out.prompts), settings, terms, voting=bool(config.eval.k))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and torch after the block.

    Samples have seeds of their own; this protects training from tools, environments and rewards
    that use the global generators.
    """
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states, "the process")
