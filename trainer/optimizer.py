"""AdamW over sharded parameters, and the learning rate as a function of how many updates were applied."""

import math
from typing import Any, Literal

import torch
from torch import nn


def learning_rate_factor(
    update: int, warmup: int, total: int, schedule: Literal["constant", "linear", "cosine"] = "constant"
) -> float:
    """What the peak learning rate is multiplied by for update number `update`, from 0.

    Warm-up is linear and reaches 1 at update `warmup`; it begins above 0, so that no update is spent on nothing. After
    it the rate stays, or falls to 0 at `total`, in a line or along half a cosine. Because this is a function of the
    number of *applied* updates there is no scheduler state: a skipped update does not advance it, and a resumed run
    needs only its number.
    """
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


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
