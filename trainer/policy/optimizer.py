"""AdamW over sharded parameters, and the learning rate as a function of the run's progress.

`Updates` and `Figures` are common to all models, whatever shards them.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sharding.ranks import all_reduce_sum
from trainer.config.schema import PolicyConfig
from trainer.types import UpdateStats


def learning_rate_factor(
    applied: int,
    place: float,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
) -> float:
    """Factor of the peak learning rate for the next update.

    Warm-up is linear in the updates that were *applied*, since it is they that Adam's moments need, and reaches 1 after
    `warmup` of them; it begins above 0, so that no update is spent on nothing. The rate stays there, or falls to 0 at
    the end of the run, in a line or along half a cosine. How far the run has come is counted in its steps, not in
    updates: steps that have fewer updates than were asked for, or none, bring the end nearer all the same. There is no
    scheduler state: a resumed run needs only the number of its step and of its applied updates.

    Args:
        applied: updates so far, without those that were skipped.
        place: where the run is: the updates it would have done so far, had every step as many as asked for. Within a
            step of n updates in place of N they are N / n apart.
        total: what `place` is at the end of the run.
    """
    rise = min(1.0, (applied + 1) / (warmup + 1))
    if schedule == "constant":
        return rise
    progress = min(1.0, max(0.0, place - warmup) / max(1, total - warmup))
    return min(rise, 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def make_adamw(
    parameters: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """A fused AdamW whose state exists from the start, sharded like the parameters and in their dtype (float32).

    The state is made here rather than by the first step, so that a checkpoint written before the first update has the
    same contents as any other and reading it is writing into tensors that are there.
    """
    groups = decay_groups(parameters, weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups.

    Biases and norms get no weight decay: decoupled decay pulls towards 0, which for a norm's scale is not neutral.
    """
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]  # ZeRO-3 leaves parameters empty
    vectors = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


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
        applied: those that changed the weights.
        skipped_in_a_row: the latest ones that did not, because loss or gradient was not finite.
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
        """Continue from `counters`."""
        self.applied, self.skipped_in_a_row = counters.tolist()
