"""The logits that a model makes of its output head's products, read off the model's own forward
pass.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POWERS = (-20.0, 20.0)
"""Powers of 2 between which products are tried: no cap changes the smallest, and the largest
becomes the cap.
"""


@dataclass(frozen=True)
class Logits:
    """The logits that a model makes of its head's products x: x times a factor a, or with a cap c,
    c tanh(a x / c).

    By default, the products are the logits. `logits_of` reads these numbers off a model.
    """

    factor: float = 1.0
    cap: float | None = None
    before: float = 1.0  # a factor of the hidden states, before the head

    def of(self, products: Tensor) -> Tensor:
        """Return the logits of the products [R, C], before the temperature, in their dtype; may
        overwrite them.
        """
        products = products if self.factor == 1.0 else products.mul_(self.factor)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slopes(self, logits: Tensor) -> Tensor | None:
        """Return the derivatives of the logits [R, C] that `of` returned, in a tensor of its own;
        None means 1.
        """
        if self.cap is None:
            return None if self.factor == 1.0 else logits.new_full((), self.factor)
        return logits.div(self.cap).square_().neg_().add_(1.0).mul_(self.factor)


UNCHANGED = Logits()
"""The products are the logits."""


def logits_of(model: "PreTrainedModel") -> Logits:
    """Return what a model, which may be on meta or sharded, does to its head's products.

    The model's own forward pass runs, without its layers: the trunk returns given hidden states,
    and the head given products. The model itself does not change. Raises UserError if the result is
    not that of any `Logits`.
    """
    logits = None
    cause = None
    try:
        with _disable_current_modes(), torch.no_grad():
            # Such as fake tensors, of which no values could be read
            logits = _probed(model)
    except Exception as error:  # the model's own code may raise anything
        cause = error
    if logits is None:
        name = type(model).__name__
        raise UserError(
            f"{name} makes its logits in a way that the trainer does not compute: use another model"
        ) from cause
    return logits


def _probed(model: "PreTrainedModel") -> Logits | None:
    head = model.get_output_embeddings()
    trunk = model.base_model
    hidden = torch.arange(head.in_features, dtype=torch.float64).remainder(3).add(1).view(1, 1, -1)
    products = torch.logspace(*_POWERS, head.out_features, base=2.0, dtype=torch.float64)
    products[1::2] *= -1
    answers = {
        id(trunk): _Double(trunk, _Output((hidden,))),
        id(head): _Double(head, products.view(1, 1, -1)),
    }
    double = copy.copy(model)
    double._modules = {name: answers.get(id(part), part) for name, part in model._modules.items()}
    output = double.forward(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    return _fitted(products, output.logits.flatten(), answers[id(head)].inputs[0] / hidden)


def _fitted(products: Tensor, logits: Tensor, before: Tensor) -> Logits | None:
    """Return the change from products to logits, [V], and of the hidden states before them; None if
    none fits.
    """
    slope = logits[0] / products[0]
    cap = None if _close(logits, slope * products) else _number(logits.abs().amax())
    change = Logits(_number(slope), cap, _number(before.flatten()[0]))
    fits = _close(logits, change.of(products.clone())) and _close(
        before, torch.full_like(before, change.before)
    )
    return change if fits else None


def _number(measured: Tensor) -> float:
    """Return a number without the rounding error of float64."""
    return float(f"{measured.item():.12g}")


def _close(left: Tensor, right: Tensor) -> bool:
    """Compare up to the rounding of a model that computes its logits in float32."""
    return torch.allclose(left.double(), right.double(), rtol=1e-6, atol=1e-12)


class _Double(nn.Module):
    """A module that answers with `output` whatever it is called with, and has the attributes of the
    one it replaces.
    """

    def __init__(self, replaced: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__["replaced"] = replaced
        self.output = output
        self.inputs: tuple[Any, ...] = ()
        self.weight = torch.empty(0, dtype=torch.float64)  # models read its dtype and device

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Keep the inputs, and return the output."""
        self.inputs = inputs
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)


class _Output(tuple[Tensor]):
    """The output of a trunk: a tuple of its hidden states, which also has them by name; everything
    else is None.
    """

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
