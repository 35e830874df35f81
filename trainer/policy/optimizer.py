"""The optimizer steps of a model, whatever shards it: AdamW, their number, their learning rate and their figures."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sharding.ranks import all_reduce_sum
from sharding.send.source import whole_shape
from trainer.config.schema import PolicyConfig
from trainer.types import MicroBatch, UpdateStats

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside its steps."""


def learning_rate_factor(
    applied: int, place: float, warmup: int, total: int, schedule: Literal["constant", "linear", "cosine"] = "constant"
) -> float:
    """The factor by which the peak learning rate is multiplied for the next update.

    Warm-up is linear in the *applied* updates, which Adam's moments need, and reaches 1 after `warmup` of them; it
    begins above 0, so that the first update changes something. The rate stays there, or falls to 0 at the end of the
    run, in a line or along half a cosine. Progress is counted in the run's steps: steps with fewer updates than asked
    for, or none, bring the end nearer all the same. There is no scheduler state: a resumed run needs only the number of
    its step and of its applied updates.

    `applied` are the updates so far, without those that were skipped; `place` is the run's progress: the updates it
    would have done so far, had every step as many as asked for (within a step of n updates in place of N they are N / n
    apart); `total` is `place` at the end of the run.
    """
    rise = min(1.0, (applied + 1) / (warmup + 1))
    if schedule == "constant":
        return rise
    progress = min(1.0, max(0.0, place - warmup) / max(1, total - warmup))
    return min(rise, 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def make_adamw(parameters: list[nn.Parameter], settings: PolicyConfig) -> torch.optim.AdamW:
    """A fused AdamW whose state exists from the start, sharded like the parameters and in their dtype (float32).

    So a checkpoint written before the first update has the same contents as any other, and is read into tensors that
    exist.
    """
    groups = decay_groups(parameters, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    optimizer.state.update({parameter: state_of_no_steps(parameter) for parameter in parameters})
    return optimizer


def state_of_no_steps(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's of a parameter, or of a part of one."""
    moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups.

    Biases and norms get no weight decay: decoupled decay pulls towards 0, which for a norm's scale is not neutral.
    """
    matrices = [p for p in parameters if len(whole_shape(p)) > 1]
    vectors = [p for p in parameters if len(whole_shape(p)) <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


class Figures:
    """An update's loss and its loss function's figures, summed over micro-batches, then over ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=device)}

    def add(self, batch: MicroBatch, loss: Tensor, sums: dict[str, Tensor]) -> None:
        """Count a micro-batch: scalars, kept on their device so that nothing waits for it.

        Ranks that share one have all of its loss and figures, and the first of them counts.
        """
        for key, value in [("loss", loss), *sums.items()]:
            own = value.detach().double() if batch.counts else torch.zeros_like(value, dtype=torch.float64)
            self._sums[key] = self._sums.get(key, 0.0) + own

    def over_ranks(self, **own: Tensor) -> dict[str, float]:
        """All sums, with this rank's further scalars `own`. Collective: every rank has counted the same names."""
        sums = self._sums | {name: value.to(self._sums["loss"]) for name, value in own.items()}
        return all_reduce_sum(dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)))


class Updates:
    """The updates of one model."""

    def __init__(self, settings: PolicyConfig, total: int) -> None:
        """`total`: where the learning rate's schedule ends, in updates asked for."""
        self._settings, self._total = settings, total
        self.applied = 0  # the number that changed the weights
        self.skipped_in_a_row = 0  # of the latest that did not, since their loss or gradient was not finite

    def learning_rate(self, place: float | None) -> float:
        """The next update's; see `learning_rate_factor`. None: as many updates were asked for as were applied."""
        settings, place = self._settings, self.applied if place is None else place
        factor = learning_rate_factor(self.applied, place, settings.warmup_steps, self._total, settings.schedule)
        return settings.lr * factor

    def count(self, skipped: bool, norm: float, rate: float, sums: dict[str, float]) -> UpdateStats:
        """Count one more update and return its stats, with its gradients' global L2 norm and its learning rate.

        `sums` is the result of `Figures.over_ranks`. Raises TrainingDiverged when the last `max_skipped_steps` updates
        were all skipped.
        """
        figures = {name: value for name, value in sums.items() if name != "loss"}
        stats = UpdateStats(loss=sums["loss"], grad_norm=norm, learning_rate=rate, skipped=skipped, sums=figures)
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
        """Take over a tensor that `counters` gave."""
        self.applied, self.skipped_in_a_row = counters.tolist()
