"""The batch of one step: its rounds of answers, and the groups of them to train on."""

import math
from collections.abc import Sequence
from dataclasses import replace

from generation.engine.sampling import sample_seed
from trainer.algorithms.shaping import SamplingDecision, dynamic_sampling
from trainer.config.schema import TrainConfig
from trainer.data import Prompt, PromptDataset
from trainer.learning.answers import Answer
from trainer.learning.groups import Group, informative, make_groups
from trainer.learning.metrics import Metrics
from trainer.rollouts.round import Order, Round


class StepBatch:
    """The prompts and answers of a step so far, and the number of prompts still missing. The same
    on all ranks.

    A step has one round, or several until enough groups have a signal:

        batch = StepBatch(config, dataset)
        while batch.missing:
            seed = batch.seed(step)
            batch.add(...)  # a round of `batch.missing` prompts, sampled with this seed
        answers, groups = batch.kept()  # to train on

    Attributes:
        rounds: the rounds of the step, in order.
        prompts: the prompts of all rounds, in order.
        answers: the answers of all ranks; their `prompt_index` is the index in `prompts`.
    """

    def __init__(self, config: TrainConfig, dataset: PromptDataset) -> None:
        """Begin a batch without rounds. `dataset` has the training prompts."""
        self._config = config
        self._dataset = dataset
        self._target = config.batch.prompts_per_step
        self._selects = config.algorithm.selects_groups
        self.rounds: list[Round] = []
        self.prompts: list[Prompt] = []
        self.answers: list[Answer] = []
        self._groups: list[Group] = []
        self._decision = SamplingDecision([], math.ceil(self._target * config.algorithm.oversampling), 0)

    @classmethod
    def of(
        cls, rounds: Sequence[Round], order: Order, config: TrainConfig, dataset: PromptDataset
    ) -> "StepBatch":
        """Return the batch of an order whose rounds other ranks have sampled, or this run before a
        restart. Collective.

        The arguments after `order` are those of the constructor.
        """
        batch = cls(config, dataset)
        version = order.version if config.rollout.ages else None
        for sampled in rounds:
            sampled.answers(config.algorithm.rewards_apart, version)
            batch.add(sampled)
        return batch

    @property
    def missing(self) -> int:
        """The number of prompts to sample next; 0: train now."""
        return self._decision.sample

    @property
    def position(self) -> int:
        """The position of the next prompt in the training sequence, after the last round."""
        return self.rounds[-1].position

    def seed(self, step: int) -> int:
        """Return the seed of the next round: the run's at first, then others, which give a prompt
        new answers.
        """
        seed = self._config.run.seed
        return sample_seed(seed, step, -1, len(self.rounds)) if self.rounds else seed

    def add(self, sampled: Round) -> None:
        """Add a round whose answers have been gathered, and decide how many prompts are still
        missing.
        """
        seed = self._config.run.seed
        prompts = [self._dataset.take(position, 1, seed)[0] for position in sampled.places]
        answers = sampled.answers()
        for answer in answers:
            answer.stored_images = prompts[answer.prompt_index].images
        if earlier := len(self.prompts):
            answers = [replace(answer, prompt_index=answer.prompt_index + earlier) for answer in answers]
        self.rounds.append(sampled)
        self.prompts += prompts
        self.answers += answers
        self._groups += make_groups(answers)
        self._decision = self._decide()

    def _decide(self) -> SamplingDecision:
        if not self._selects:
            return SamplingDecision(list(range(len(self.prompts))), 0, 0)
        algorithm = self._config.algorithm
        with_signal = {group[0][0].prompt_index for group in self._groups if informative(group)}
        return dynamic_sampling(
            [index in with_signal for index in range(len(self.prompts))],
            self._target,
            len(self.rounds),
            algorithm.sampling_rounds,
            algorithm.oversampling,
            algorithm.at_bound,
        )

    def kept(self) -> tuple[list[Answer], list[Group]]:
        """Return the answers to train on and their groups, once no prompt is missing."""
        keep = set(self._decision.keep)
        answers = [answer for answer in self.answers if answer.prompt_index in keep]
        groups = [group for group in self._groups if group[0][0].prompt_index in keep]
        return answers, groups

    def metrics(self) -> Metrics:
        """Return the number of rounds and those of missing and unused groups, and the metrics of
        slices, if any.
        """
        slices = self.rounds[-1].figures
        if not self._selects:
            return dict(slices)
        return {
            "sampling/rounds": float(len(self.rounds)),
            "sampling/shortfall": float(self._decision.shortfall),
            "sampling/dropped": float(len(self.prompts) - len(self._decision.keep)),
        } | slices
