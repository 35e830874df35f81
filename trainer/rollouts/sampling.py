"""The source of answers of a rank in whose crew engines run, which sample and score the answers of an order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from generation.engine.sampling import SamplingSettings
from generation.rollouts.episode import RolloutSettings
from sharding.ranks import EVERYBODY, rank
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, PromptDataset
from trainer.learning.answers import Answer, gather_answers
from trainer.learning.dynamic import StepSampling
from trainer.rollouts.carried import CarriedPool
from trainer.rollouts.pool import Pool, Terms
from trainer.rollouts.round import Order, Round, packed, sampled_round
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


class Sampling:
    """The `Source` that samples steps and evaluations on the engines of this rank's crew."""

    def __init__(
        self,
        config: TrainConfig,
        pool: Pool,
        prompts: PromptDataset,
        sampling: SamplingSettings,
        held_outs: Sequence[HeldOut] = (),
        lengths: dict[int, int] | None = None,
        give_up: Callable[[], bool] = lambda: False,
        carried: CarriedPool | None = None,
    ) -> None:
        """Samples on the engines of `pool`.

        Args:
            sampling: the sampling settings of the training `prompts`.
            held_outs: the datasets of an evaluation.
            lengths: as `Terms.lengths`; used in training only.
            give_up: polled during a step; True abandons the step, since the run was asked to end.
            carried: the pool of the same engines' groups that grow slice by slice; None: answers are sampled whole.
        """
        self._config = config
        self._pool = pool
        self._carried = carried
        self._prompts = prompts
        self._sampling = sampling
        self._held_outs = held_outs
        self._lengths = lengths
        self._give_up = give_up

    @property
    def finished(self) -> int:
        """The number of answers in this round that this rank's engine has finished."""
        return self._pool.finished

    def produce(self, order: Order) -> list[Round]:
        """Samples an order, as `Source.produce`: a step round by round until the algorithm has enough groups."""
        if order.evaluates:
            with random_states_kept():
                return [self._evaluated(held_out, order) for held_out in self._held_outs]
        self.take_back(order.step)
        sampled, rounds, position = StepSampling(self._config), list[Round](), order.position
        while sampled.missing:
            rounds.append(self._round(order, position, sampled.missing, sampled.seed(order.step)))
            position = rounds[-1].position
            sampled.add(prompts_at(self._prompts, self._config, rounds[-1]), rounds[-1].answers())
        return rounds

    def _round(self, order: Order, position: int, count: int, seed: int) -> Round:
        """Samples the `count` prompts from `position` on; with slices, returns `count` groups, begun now or earlier."""
        config = self._config
        size, extra = config.algorithm.group_size, config.data.chat_template_kwargs
        settings = RolloutSettings(size, self._sampling, order.version, seed, order.step, chat_template_kwargs=extra)
        deadline, details = config.run.first_step_deadline_s, config.algorithm.rewards_apart
        terms = Terms(deadline, self._give_up, details, self._lengths)
        if self._carried is not None:
            return self._carried.take(position, count, settings, terms)
        answers = self._pool.run(self._prompts.take(position, count, config.run.seed), settings, terms)
        places = range(position, position + count)
        return sampled_round(answers, order.step, order.version, places, position + count)

    def _evaluated(self, held_out: HeldOut, order: Order) -> Round:
        answers = sample_held_out(self._config, self._pool, held_out, version=order.version, step=order.step)
        return sampled_round(answers, order.step, order.version, (), order.position)

    def replayed(self, rounds: list[Round], ahead: bool) -> None:
        """Does nothing: without slices, sampling does not depend on earlier rounds, and slices exclude a journal."""

    def take_back(self, step: int) -> None:
        """Undoes an attempt at this step, as `Source.take_back`."""
        self._pool.take_back()
        if self._carried is not None:
            self._carried.take_back(step)

    def add_state(self, last: Round, random_states: str) -> None:
        """Adds random states, unfinished groups and untrained answers of this rank to a step's last round."""
        last.random_states = {rank(EVERYBODY): random_states}
        if self._carried is not None:
            last.untrained, last.groups = self._carried.present(), self._carried.groups()

    def carried(self) -> bytes:
        """Packs the groups of this rank's engine at the end of the last step; b"" without slices."""
        if self._carried is None or self._pool.leader is None:
            return b""
        return packed([Round(groups=self._carried.groups())])

    def untrained(self) -> list[Answer]:
        """Returns a few waiting or unfinished answers of all engines, as `Source.untrained`; [] without slices."""
        return [] if self._carried is None else gather_answers(self._carried.present(), version=self._carried.version)

    def waits_for(self) -> str:
        """Says what a slice is waiting for, as `Source.waits_for`; "" without slices."""
        return "" if self._carried is None else self._carried.waits_for()

    def close(self) -> None:
        """Ends the episodes under way, their servers and processes. Call it before the engine stops."""
        if self._carried is not None:
            self._carried.close()
        self._pool.close()


def prompts_at(prompts: PromptDataset, config: TrainConfig, taken: Round) -> list[Prompt]:
    """Returns the prompts of a round's groups, in their order."""
    return [prompts.take(place, 1, config.run.seed)[0] for place in taken.places]


def sample_held_out(
    config: TrainConfig, pool: Pool, held_out: HeldOut, version: int = 0, step: int = -1
) -> list[Answer]:
    """Samples and scores a dataset's prompts on all engines; returns answers with details and votes. Collective.

    The engines have the weights of `version`. `step` selects the samples' seeds: -1 before a run's first step, and one
    less after each further step.
    """
    seed, extra = config.run.seed, config.data.chat_template_kwargs
    settings = RolloutSettings(
        held_out.samples, held_out.sampling, version, seed, step, chat_template_kwargs=extra, evaluation=True
    )
    terms = Terms(config.run.first_step_deadline_s, details=True)
    return pool.run(list(held_out.prompts), settings, terms, voting=bool(config.eval.k))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the global random generators of Python, NumPy and torch after the block.

    Samples have seeds of their own; this protects training from tools, environments and rewards that use the global
    generators.
    """
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states, "the process")
