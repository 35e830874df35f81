"""The source of answers of a rank whose crew has engines: what an order asks for is sampled on them, and scored."""

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
    """A dataset to evaluate on.

    Attributes:
        samples: number of answers for each prompt.
    """

    name: str
    prompts: PromptDataset
    sampling: SamplingSettings
    samples: int


class Sampling:
    """Samples steps and evaluations on the engines of this rank's crew. See `Source`."""

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
        """Sample on the engines of `pool`.

        Args:
            sampling: of the answers to the training `prompts`.
            held_outs: datasets of an evaluation.
            lengths: see `Terms`; of training only.
            give_up: asked now and then, whether to leave a step's answers be, since the run is asked to end.
            carried: the groups of the same engines that grow slice by slice; None: answers are not cut.
        """
        self._config, self._pool, self._carried, self._prompts = config, pool, carried, prompts
        self._sampling, self._held_outs, self._lengths, self._give_up = sampling, held_outs, lengths, give_up

    @property
    def finished(self) -> int:
        """See `Source`."""
        return self._pool.finished

    def produce(self, order: Order) -> list[Round]:
        """See `Source`. A step is sampled round by round until the algorithm has the groups that it asks for."""
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
        """The answers to `count` prompts, the next of which is at `position`; or, where answers are cut, as many."""
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
        """See `Source`: nothing depends on what was sampled before, where answers are not cut."""

    def take_back(self, step: int) -> None:
        """See `Source`."""
        self._pool.take_back()
        if self._carried is not None:
            self._carried.take_back(step)

    def add_state(self, last: Round, random_states: str) -> None:
        """Give a step's last round, which leaves this rank, what goes on here after it."""
        last.random_states = {rank(EVERYBODY): random_states}
        if self._carried is not None:
            last.untrained, last.groups = self._carried.present(), self._carried.groups()

    def carried(self) -> bytes:
        """See `Source`. The groups that this rank's engine had when the last step was done."""
        if self._carried is None or self._pool.leader is None:
            return b""
        return packed([Round(groups=self._carried.groups())])

    def untrained(self) -> list[Answer]:
        """See `Source`: of each engine some answers that wait or are unfinished."""
        return [] if self._carried is None else gather_answers(self._carried.present(), version=self._carried.version)

    def waits_for(self) -> str:
        """See `Source`."""
        return "" if self._carried is None else self._carried.waits_for()

    def close(self) -> None:
        """End the episodes under way, and what they have started; before the engine stops."""
        if self._carried is not None:
            self._carried.close()
        self._pool.close()


def prompts_at(prompts: PromptDataset, config: TrainConfig, taken: Round) -> list[Prompt]:
    """The prompts of a round's groups, in their order."""
    return [prompts.take(place, 1, config.run.seed)[0] for place in taken.places]


def sample_held_out(
    config: TrainConfig, pool: Pool, held_out: HeldOut, version: int = 0, step: int = -1
) -> list[Answer]:
    """All engines' answers to a dataset's prompts, scored, with details and votes. Collective.

    The engines hold weights of `version`. `step` chooses the samples' seeds: -1 before a run's first step, one less
    after each.
    """
    seed, extra = config.run.seed, config.data.chat_template_kwargs
    settings = RolloutSettings(
        held_out.samples, held_out.sampling, version, seed, step, chat_template_kwargs=extra, evaluation=True
    )
    terms = Terms(config.run.first_step_deadline_s, details=True)
    return pool.run(list(held_out.prompts), settings, terms, voting=bool(config.eval.k))


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch after the block, whatever it draws from them.

    Samples have seeds of their own; this is about tools, environments and rewards that use those generators.
    """
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states, "the process")
