"""The losses of a training call: sums over tokens, by name or from a function of
log-probabilities.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.catalogue import Loss
from trainer.algorithms.losses import LEVELS, LOSSES, log_ratio
from trainer.errors import UserError
from trainer.training.data import Datum
from trainer.types import MicroBatch, Outputs

LossFunction = Callable[[Sequence[Datum], list[Tensor]], Any]
"""A loss of the user's own: (data, log-probabilities [N] of each datum's targets) -> a scalar, or a
pair of a scalar and figures by name.
"""


def cross_entropy(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p for each token, and a mask of no tokens."""
    return -logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def importance_sampling(log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -r A for each token, where r is the policy's probability over the sampler's."""
    return -log_ratio.exp() * advantages, torch.zeros_like(log_ratio, dtype=torch.bool)


_Entry = tuple[Loss, dict[str, Any]]
_OURS: dict[str, _Entry] = {name: (loss, {}) for name, loss in LOSSES.items()}
NAMED: dict[str, _Entry] = {
    "cross_entropy": (Loss(cross_entropy, "the negative log-probability"), {}),
    "importance_sampling": (Loss(importance_sampling, "ratios without bounds"), {}),
    "ppo": (LOSSES["clip"], {"clip_high": 0.2}),
    "gspo": (LOSSES["clip"], {"ratio_level": "geometric", "clip_low": 3e-4, "clip_high": 4e-4}),
    **_OURS,
}
"""The losses by name, with the options in which they differ from the function's defaults."""

_FIELDS = {"log_ratio": "logprobs", "advantages": "advantages"}


class NamedLoss:
    """A loss from `NAMED`, called for each micro-batch of a call (`trainer.types.LossFn`).

    The sum over tokens of weight times loss. Ratios are those of the policy to the data's
    log-probabilities, and are bounded as in `losses.log_ratio`. Metrics are sums, too.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Look a loss up; `options` are keys of the recipe's section `algorithm` that it takes.

        Raises UserError for a name or an option that it does not know, or that is no number.
        """
        if name not in NAMED:
            names = ", ".join(NAMED)
            raise UserError(f"there is no loss {name!r}: name one of {names}, or give a function")
        self._loss, defaults = NAMED[name]
        self._options = {**self._loss.defaults, **defaults, **options}
        known = [*self._loss.defaults, *(["ratio_level"] if self._loss.takes("log_ratio") else [])]
        for option, value in options.items():
            if option not in known:
                takes = ", ".join(known) or "none"
                raise UserError(f"the loss {name} has no option {option}: it takes {takes}")
            if option == "ratio_level" and value not in LEVELS:
                raise UserError(f"ratio_level is {value!r}: name one of {', '.join(LEVELS)}")
            if option != "ratio_level" and not _is_number(value):
                raise UserError(f"{option} is {value!r}: give a number")
        self._gaps: list[Tensor] = []
        self.needs = [field for tensor, field in _FIELDS.items() if self._loss.takes(tensor)]

    def __call__(self, batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.loss_mask
        assert batch.weights is not None
        tensors = {"logprobs": outputs.logprobs, "advantages": batch.advantages, "mask": mask}
        if self._loss.takes("log_ratio"):
            level = self._options.get("ratio_level", "token")
            tensors["log_ratio"] = log_ratio(outputs.logprobs, batch.engine_logprobs, mask, level)
        loss, bounded = self._loss(self._options, **tensors)
        gap = (outputs.logprobs.detach() - batch.engine_logprobs).abs() * mask
        self._gaps.append(gap.max())
        sums = {
            "tokens": mask.sum(),
            "entropy": (outputs.entropy.detach() * mask).sum(),
            "clipped": (bounded * mask).sum(),
            "gap": gap.sum(),
        }
        return (loss * batch.weights).sum(), sums

    def largest_gap(self) -> float:
        """Return the largest distance, in nats, of this rank's log-probabilities to the data's."""
        return torch.stack(self._gaps).max().item()


def _is_number(value: Any) -> bool:
    """Return True for a number, None, or a pair of numbers, as options are."""
    values = value if isinstance(value, tuple) else (value,)
    return all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in values)


def slopes_of(
    function: LossFunction, data: Sequence[Datum], logprobs: Sequence[Tensor]
) -> tuple[list[Tensor], float, dict[str, float]]:
    """Return the derivatives of a user's loss by each log-probability, its value, and its figures.

    Raises UserError if the function raises, or returns no finite scalar with a gradient.
    """
    name = getattr(function, "__name__", type(function).__name__)
    leaves = [values.clone().requires_grad_() for values in logprobs]
    try:
        result = function(data, leaves)
    except Exception as error:  # the user's function may raise anything
        raise UserError(f"the loss {name} raised {type(error).__name__}: {error}") from error
    loss, figures = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        what = "a scalar tensor computed from the log-probabilities"
        raise UserError(f"the loss {name} returned {type(loss).__name__}: return {what}")
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    if not all(slope.isfinite().all() for slope in (loss, *slopes)):
        raise UserError(f"the loss {name}, or its gradient, is not finite: look at the data's values")
    numbers = {key: float(torch.as_tensor(value).detach()) for key, value in figures.items()}
    return list(slopes), loss.item(), numbers
