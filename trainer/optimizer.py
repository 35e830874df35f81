"""AdamW over sharded parameters, and the learning rate as a function of how far the run has come."""

import math
from typing import Any, Literal

import torch
from torch import nn


def learning_rate_factor(
    applied: int,
    place: float,
    warmup: int,
    total: int,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
) -> float:
    """What the peak learning rate is multiplied by for the next update.

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
