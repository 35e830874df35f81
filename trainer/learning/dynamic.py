"""Sampling of a step's prompts and answers: one round, or several until enough groups have a signal."""

import math
from dataclasses import replace

from generation.engine.sampling import sample_seed
from trainer.algorithms.shaping import SamplingDecision, dynamic_sampling
from trainer.config.schema import TrainConfig
from trainer.data import Prompt
from trainer.learning.answers import Answer
from trainer.learning.groups import Group, informative, make_groups
from trainer.learning.metrics import Metrics


class StepSampling:
    """The prompts and answers of a step so far, and the number of prompts still missing. The same on all ranks."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._rounds = 0
        self._wanted = config.batch.prompts_per_step
        self._selects = config.algorithm.selects_groups
        self.prompts: list[Prompt] = []  # those of all rounds, in order
        self.answers: list[Answer] = []  # their `prompt_index` is the index in `prompts`
        self._groups: list[Group] = []
        self._decision = SamplingDecision([], math.ceil(self._wanted * config.algorithm.oversampling), 0)

    @property
    def missing(self) -> int:
        """The number of prompts to sample next; 0: train now."""
        return self._decision.sample

    def seed(self, step: int) -> int:
        """The seed of the next round: the run's at first, then others, so that a repeated prompt gets new answers."""
        seed = self._config.run.seed
        return sample_seed(seed, step, -1, self._rounds) if self._rounds else seed

    def add(self, prompts: list[Prompt], answers: list[Answer]) -> None:
        """Adds one round's prompts and answers, and decides how many prompts are still missing."""
        if earlier := len(self.prompts):
            answers = [replace(answer, prompt_index=answer.prompt_index + earlier) for answer in answers]
        self._rounds += 1
        self.prompts += prompts
        self.answers += answers
        self._groups += make_groups(answers)
        algorithm = self._config.algorithm
        if not self._selects:
            self._decision = SamplingDecision(list(range(len(self.prompts))), 0, 0)
            return
        with_signal = {group[0][0].prompt_index for group in self._groups if informative(group)}
        flags = [index in with_signal for index in range(len(self.prompts))]
        self._decision = dynamic_sampling(
            flags, self._wanted, self._rounds, algorithm.sampling_rounds, algorithm.oversampling, algorithm.at_bound
        )

    def kept(self) -> tuple[list[Answer], list[Group]]:
        """The answers to train on and their groups, once no prompt is missing."""
        keep = set(self._decision.keep)
        answers = [answer for answer in self.answers if answer.prompt_index in keep]
        return answers, [group for group in self._groups if group[0][0].prompt_index in keep]

    def metrics(self) -> Metrics:
        """The numbers of rounds, of groups that are missing, and of groups that were not used."""
        if not self._selects:
            return {}
        return {
            "sampling/rounds": float(self._rounds),
            "sampling/shortfall": float(self._decision.shortfall),
            "sampling/dropped": float(len(self.prompts) - len(self._decision.keep)),
        }
