"""The functions that a recipe chooses by name: a record of each says what it needs, and what its name means.

A function's parameters are named for what they are given: tensors of the step, and keys of the recipe's section
`algorithm`. So its signature says what it needs (one that takes `values` needs a critic), and whoever has to know asks
its record. The tables of records are at the end of `advantages`, `losses`, `kl` and `aggregation`. A function of the
user's, `pkg.mod:fn` or `file.py:fn`, has a record like any other.

Recipes are checked by the records, and without torch, although a record is beside its function: those modules take
`torch` from here, which is imported when a function first computes.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.errors import UserError

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch, Tensor = _Torch(), Any


@dataclass(frozen=True)
class Record:
    """A function that a recipe can name."""

    function: Callable[..., Any]
    meaning: str  # of its name, in one line, for --help
    own: str = ""  # where it is the user's, the key and the name, with which its errors begin
    OFFERED: ClassVar[tuple[str, ...]] = ()  # the tensors that it may take
    RETURNS: ClassVar[str] = "a tensor"  # the tensors that it returns, in words; `outputs` is their number

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters, by name."""
        return inspect.signature(self.function).parameters

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The parameters that may be left out, and their values."""
        return {name: p.default for name, p in self.parameters.items() if p.default is not p.empty}

    @property
    def offered(self) -> tuple[str, ...]:
        """The tensors that it may take."""
        return self.OFFERED

    @property
    def outputs(self) -> int:
        return 1

    def takes(self, name: str) -> bool:
        """True if the function has a parameter of this name."""
        return name in self.parameters

    def check_signature(self, keys: Collection[str]) -> None:
        """Raise UserError unless a function of the user's can be called with what is offered, and with `keys`."""
        try:
            parameters = self.parameters.values()
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.own} does not say what it takes: name a Python function") from error
        offered = self.offered
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(f"{self.own} takes {parameter}, but is called by name: give each parameter a name")
            if parameter.name not in (*offered, *keys, *self.defaults):
                without = " without mask" if parameter.name in self.OFFERED else ""
                raise UserError(
                    f"{self.own} asks for {parameter.name}, but{without} is given {', '.join(offered)} and keys of the "
                    "section algorithm: take one of these, or give it a default"
                )

    def __call__(self, keys: Mapping[str, Any], **tensors: Tensor | None) -> Any:
        """Call the function with those of `tensors` and `keys` that it takes; null leaves a default as it is.

        Raises UserError for whatever a function of the user's does wrong.
        """
        given = {name: tensors.get(name, keys.get(name)) for name in self.parameters}
        given = {name: value for name, value in given.items() if value is not None or name not in self.defaults}
        if not self.own:
            return self.function(**given)
        try:
            result = self.function(**given)
        except Exception as error:
            stack, file = traceback.extract_tb(error.__traceback__)[1:], inspect.getfile(self.function)
            line = next((f" in line {frame.lineno}" for frame in reversed(stack) if frame.filename == file), "")
            raise UserError(f"{self.own} raised {type(error).__name__}{line}: {error}") from error
        self._check_result(result, [tensor for name in given if (tensor := tensors.get(name)) is not None])
        return result

    def _check_result(self, result: Any, inputs: list[Tensor]) -> None:
        found = result if isinstance(result, tuple) else (result,)
        if len(found) != self.outputs or not all(isinstance(each, torch.Tensor) for each in found):
            kinds = ", ".join(type(each).__name__ for each in found)
            raise UserError(f"{self.own} returned {kinds}, but should return {self.RETURNS}")
        for each in found:
            if each.shape != inputs[0].shape:
                shapes = f"{list(each.shape)} for tensors of shape {list(inputs[0].shape)}"
                raise UserError(f"{self.own} returned a tensor of shape {shapes}, but should return {self.RETURNS}")
        if any(tensor.requires_grad for tensor in inputs) and not found[0].requires_grad:
            raise UserError(f"{self.own} returned a loss without a gradient: compute it from log_ratio or logprobs")
        if all(each.isfinite().all() for each in inputs) and (bad := sum(int((~e.isfinite()).sum()) for e in found)):
            count = sum(each.numel() for each in found)
            raise UserError(
                f"{self.own} returned {bad} of {count} values that are not finite, all it was given being so"
            )


@dataclass(frozen=True)
class Advantage(Record):
    """An estimator of how much better an answer or a token was than expected.

    One that takes `mask` works on tokens: all tensors are [B, T], rewards on the tokens that end a turn or the episode.
    Any other compares the answers of a group: rewards [1, G].
    """

    whitened: bool = False  # the mean and the spread of the whole step are taken out of it
    turns: bool = False  # in a group, it also compares turns, with `advantages.turn_relative`
    sums: bool = False  # it also compares several rewards one by one, with `advantages.normalize_then_sum`
    nonnegative: bool = False  # rewards must be at least 0
    OFFERED = ("rewards", "mask", "values", "old_logprobs", "teacher_logprobs")
    RETURNS = "advantages of the shape of what it takes, and with a critic's values a pair of advantages and returns"

    @property
    def offered(self) -> tuple[str, ...]:
        """For answers of a group, only their rewards."""
        return self.OFFERED if self.by_token else ("rewards",)

    @property
    def outputs(self) -> int:
        return 1 + self.takes("values")

    @property
    def by_token(self) -> bool:
        """True if it works on tokens rather than on the answers of a group."""
        return self.takes("mask")

    @property
    def compares(self) -> bool:
        """True if it compares the answers to a prompt with each other."""
        return self.takes("rewards") and not self.by_token

    @property
    def by_turn(self) -> bool:
        """True if turns can be rewarded by themselves."""
        return self.takes("rewards") and (self.by_token or self.turns)


@dataclass(frozen=True)
class Loss(Record):
    """A policy gradient's loss for each token, [B, T] like all that it is given."""

    # its bounds are a band of ratios around 1, to which the gap between engine and trainer is compared
    band: bool = False
    OFFERED = ("log_ratio", "logprobs", "old_logprobs", "advantages", "mask")
    RETURNS = "a loss and a mask of the tokens it has bounded, both of the shape of what it takes"

    @property
    def outputs(self) -> int:
        return 2

    @property
    def has_ratios(self) -> bool:
        """True if it uses the policy's change since it sampled."""
        return self.takes("log_ratio") or self.takes("old_logprobs")


@dataclass(frozen=True)
class Estimator(Record):
    """An estimate of KL for each token."""

    in_loss: bool = True  # its gradient is of use
    in_reward: bool = False  # its expectation is exact


@dataclass(frozen=True)
class Level:
    """The level of a ratio: that of a token, or of a whole answer, in which case all its tokens have the same."""

    meaning: str  # of its name, in one line, for --help
    whole: bool = False
    mean: bool = False  # of an answer it is the geometric mean over tokens, and otherwise their product
