"""What every model's optimizer steps have in common, whatever shards it: their number, their learning rate, figures."""

import torch
from torch import Tensor

from trainer.config import PolicyConfig
from trainer.distributed import all_reduce_sum
from trainer.optimizer import learning_rate_factor
from trainer.policy.base import UpdateStats


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


class Figures:
    """Sums over an update's micro-batches, then over ranks: its loss, and what its loss function counts."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=device)}

    def add(self, loss: Tensor, sums: dict[str, Tensor]) -> None:
        """Count a micro-batch: scalars, kept on their device so that nothing waits for it."""
        for key, value in [("loss", loss), *sums.items()]:
            self._sums[key] = self._sums.get(key, 0.0) + value.detach().double()

    def over_ranks(self, **own: Tensor) -> dict[str, float]:
        """All sums, with this rank's further scalars `own`. Collective: every rank has counted the same names."""
        sums = self._sums | {name: value.to(self._sums["loss"]) for name, value in own.items()}
        return all_reduce_sum(dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)))


class Updates:
    """The updates of one model.

    Attributes:
        applied: how many changed the weights.
        skipped_in_a_row: how many of the latest did not, their loss or gradient not being finite.
    """

    def __init__(self, settings: PolicyConfig, total: int) -> None:
        """`total`: where the learning rate's schedule ends, in updates asked for."""
        self._settings, self._total = settings, total
        self.applied = self.skipped_in_a_row = 0

    def learning_rate(self, place: float | None) -> float:
        """Of the next update; see `learning_rate_factor`. None: as many updates were asked for as were applied."""
        settings, place = self._settings, self.applied if place is None else place
        factor = learning_rate_factor(self.applied, place, settings.warmup_steps, self._total, settings.schedule)
        return settings.lr * factor

    def count(self, skipped: bool, norm: float, rate: float, sums: dict[str, float]) -> UpdateStats:
        """One more update: the norm of its gradients, its learning rate and what `Figures.over_ranks` gave; its stats.

        Raises TrainingDiverged when the last `max_skipped_steps` updates were all skipped.
        """
        sums = dict(sums)
        stats = UpdateStats(sums.pop("loss"), norm, rate, skipped, sums)
        self.applied += not skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= self._settings.max_skipped_steps:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(loss {stats.loss}, gradient norm {norm}): lower policy.lr or look at the last step's batch"
            )
        return stats

    def counters(self) -> Tensor:
        """[2] int64, for a checkpoint."""
        return torch.tensor([self.applied, self.skipped_in_a_row])

    def restore(self, counters: Tensor) -> None:
        """Take over what `counters` gave."""
        self.applied, self.skipped_in_a_row = counters.tolist()
