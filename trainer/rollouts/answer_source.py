"""The interface of a training rank's source of answers."""

from typing import Protocol

from trainer.learning.answers import Answer
from trainer.rollouts.round import Order, Round
from trainer.rollouts.step_batch import StepBatch


class Source(Protocol):
    """The interface of what provides a training rank's answers. All ranks of a crew make the same
    calls.

        batch = source.produce(Order(step, policy.version, position))
        ...                                 # learns from batch.kept()
        position = batch.position
        rounds = source.evaluate(Order(-1 - step, policy.version, position))
        checkpoint = source.carried()

    `trainer.rollouts.local.LocalSource` samples answers on this rank's engine;
    `trainer.rollouts.remote.RemoteSource` orders them from engines on other ranks.
    `trainer.rollouts.journal.Journal` produces steps from either, and keeps their answers on disk.
    """

    @property
    def finished(self) -> int:
        """The number of answers in this round that this rank's engine has finished. Any thread may
        read it.
        """

    def produce(self, order: Order) -> StepBatch:
        """Return the batch of a step. Collective.

        Raises:
            RemoteError: on all ranks, if an engine failed on one. The order can be repeated.
            StepAbandoned: on all ranks, if the run was asked to end.
            NotFiniteError: on all ranks, if an engine sampled a log-probability that is not finite.
            RolloutError, RewardError: on all ranks, if too many answers have failed.
        """

    def evaluate(self, order: Order) -> list[Round]:
        """Return the rounds of an evaluation, one for each dataset. Collective; raises as
        `produce`.
        """

    def replayed(self, order: Order, rounds: list[Round], ahead: bool) -> StepBatch:
        """Continue as if the order had produced these rounds, and return their batch. Collective.

        `ahead`: the next step's will be ordered.
        """

    def take_back(self, step: int) -> None:
        """Undo an attempt at this step, if an engine's death or SIGTERM has ended one.
        Collective.
        """

    def carried(self) -> bytes:
        """Pack this rank's answers for a checkpoint. Collective."""

    def untrained(self) -> list[Answer]:
        """Return some answers with tokens of the present version that this step does not train on.
        Collective.
        """

    def waits_for(self) -> str:
        """Say what a slow rollout is waiting for; "" if that is not known. Any thread may call
        it.
        """
