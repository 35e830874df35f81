"""Optimizer steps of a model, whatever shards it: AdamW, the learning rate, and the count and
metrics of updates.

`trainer.policy.optimizer_choice` makes other optimizers.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sharding.ranks import all_reduce_sum
from sharding.send.source import whole_shape
from trainer.config.schema import PolicyConfig
from trainer.types import MicroBatch, UpdateStats

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The keys of AdamW's state of a parameter, besides the number of steps."""


def learning_rate_factor(
    applied: int,
    progress: float,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
) -> float:
    """Return the factor by which the peak learning rate is multiplied for the next update.

    Warm-up is linear in the *applied* updates, since Adam's moments need them, and reaches 1 after
    `warmup` of them; it begins above 0, so that the first update has an effect. The factor stays at
    1, or falls to 0 at the end of the run, in a straight line or along half a cosine. Progress is
    counted in the run's steps: steps with fewer updates than asked for, or none, count in full.
    There is no scheduler state: a resumed run needs only the numbers of its step and of its applied
    updates.

    `applied` is the number of updates so far, without skipped ones. `progress` is that of the run:
    the number of updates so far if every step had as many as asked for (within a step of n updates
    instead of N, they are N / n apart). `total` is `progress` at the end of the run.
    """
    rise = min(1.0, (applied + 1) / (warmup + 1))
    if schedule == "constant":
        return rise
    share = min(1.0, max(0.0, progress - warmup) / max(1, total - warmup))
    return min(rise, 1.0 - share if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share)))


def make_adamw(parameters: list[nn.Parameter], settings: PolicyConfig) -> torch.optim.AdamW:
    """Make a fused AdamW whose state exists from the start, sharded like the parameters and in
    their dtype (float32).

    A checkpoint from before the first update then has the same contents as any other, and is read
    into tensors that exist.
    """
    groups = decay_groups(parameters, settings.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )
    optimizer.state.update({parameter: state_of_no_steps(parameter) for parameter in parameters})
    return optimizer


def state_of_no_steps(parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter, or of a part of one, before the first step."""
    moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of AdamW, with and without weight decay.

    Biases and norms get no weight decay: decoupled decay pulls towards 0, which is not neutral for
    a norm's scale.
    """
    matrices = [p for p in parameters if len(whole_shape(p)) > 1]
    vectors = [p for p in parameters if len(whole_shape(p)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class TrainingDiverged(RuntimeError):
    """The error of a run in which too many updates in a row had a loss or gradient that was not
    finite.
    """


class MetricSums:
    """The loss and metrics of an update, summed over micro-batches, then over ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=device)}

    def add(self, batch: MicroBatch, loss: Tensor, sums: dict[str, Tensor]) -> None:
        """Add the scalars of a micro-batch, on their device, so that the host does not wait for it.

        All ranks that share a micro-batch have all of its loss and metrics; only the first of these
        ranks counts them.
        """
        for key, value in [("loss", loss), *sums.items()]:
            counted = (
                value.detach().double() if batch.counts else torch.zeros_like(value, dtype=torch.float64)
            )
            self._sums[key] = self._sums.get(key, 0.0) + counted

    def join(self, other: "MetricSums") -> None:
        """Add the sums of another call."""
        for key, value in other._sums.items():
            self._sums[key] = self._sums.get(key, 0.0) + value

    def over_ranks(self, **scalars: Tensor) -> dict[str, float]:
        """Return the sums over ranks, also of further scalars. Collective: every rank must have the
        same names.
        """
        sums = self._sums | {name: value.to(self._sums["loss"]) for name, value in scalars.items()}
        return all_reduce_sum(dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)))


class Updates:
    """The count of one model's updates."""

    def __init__(self, settings: PolicyConfig, total: int) -> None:
        """Start at 0; `total` is the end of the learning rate's schedule, in updates asked for."""
        self._settings = settings
        self._total = total
        self.applied = 0  # number of updates that changed the weights
        # Number of latest updates skipped, since their loss or gradient was not finite
        self.skipped_in_a_row = 0

    def learning_rate(self, progress: float | None) -> float:
        """Return the learning rate of the next update (`learning_rate_factor`); with `progress`
        None, it is `applied`.
        """
        settings = self._settings
        progress = self.applied if progress is None else progress
        factor = learning_rate_factor(
            self.applied, progress, settings.warmup_steps, self._total, settings.schedule
        )
        return settings.lr * factor

    def count(self, skipped: bool, norm: float, rate: float, sums: dict[str, float]) -> UpdateStats:
        """Count one more update and return its stats, with its gradients' global L2 norm and its
        learning rate.

        `sums` is the result of `MetricSums.over_ranks`. Raises TrainingDiverged if the last
        `max_skipped_steps` updates were all skipped.
        """
        metrics = {name: value for name, value in sums.items() if name != "loss"}
        stats = UpdateStats(
            loss=sums["loss"], grad_norm=norm, learning_rate=rate, skipped=skipped, sums=metrics
        )
        self.applied += not skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= self._settings.max_skipped_steps:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(loss {stats.loss}, gradient norm {norm}): lower policy.lr or look at the last "
                "step's batch"
            )
        return stats

    def counters(self) -> Tensor:
        """Return the counters as a tensor [2] int64, for a checkpoint."""
        return torch.tensor([self.applied, self.skipped_in_a_row])

    def restore(self, counters: Tensor) -> None:
        """Restore the counters from a tensor that `counters` returned."""
        self.applied, self.skipped_in_a_row = counters.tolist()
