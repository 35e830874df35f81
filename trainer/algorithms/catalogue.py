"""Records of the functions that a recipe chooses by name: advantages, losses, estimators of KL, and
ways to aggregate. A record holds the function and facts about it.

The parameters of a function have the names of their arguments: tensors of the step, and keys of the
recipe's section `algorithm`. So the signature says what the function needs (one that takes `values`
needs a critic), and the record answers questions about it. The tables of records are at the end of
`advantages`, `losses`, `kl` and `aggregation`. A user's function, named as `pkg.mod:fn` or
`file.py:fn`, has a record like any other.

A recipe is checked with the records, without importing torch. The modules with the functions
therefore take the name `torch` from here, which imports torch when a function first computes.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.errors import Interrupted, UserError

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
    Tensor = Any


@dataclass(frozen=True)
class Record:
    """A function that a recipe can choose by name."""

    function: Callable[..., Any]
    meaning: str  # one line for --help
    source: str = ""  # key and name of a user's function, for errors; else empty
    OFFERED: ClassVar[tuple[str, ...]] = ()  # the tensors that such a function may take
    # The tensors that such a function returns, for errors; `outputs` is their number
    RETURNS: ClassVar[str] = "a tensor"

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters, by name."""
        return inspect.signature(self.function).parameters

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default values of the parameters that have one, by name."""
        return {name: p.default for name, p in self.parameters.items() if p.default is not p.empty}

    @property
    def offered(self) -> tuple[str, ...]:
        """The tensors that this function may take."""
        return self.OFFERED

    @property
    def outputs(self) -> int:
        """The number of tensors that the function returns."""
        return 1

    def takes(self, name: str) -> bool:
        """Return True if the function has a parameter of this name."""
        return name in self.parameters

    def check_signature(self, keys: Collection[str]) -> None:
        """Raise UserError if a user's function asks for anything but the offered tensors and
        `keys`.
        """
        try:
            parameters = self.parameters.values()
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.source} has no signature to read: name a Python function") from error
        offered = self.offered
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(
                    f"{self.source} takes {parameter}, but is called by name: give each parameter a name"
                )
            if parameter.name not in (*offered, *keys, *self.defaults):
                without = " without mask" if parameter.name in self.OFFERED else ""
                raise UserError(
                    f"{self.source} asks for {parameter.name}, but{without} gets {', '.join(offered)} "
                    "and keys of the section algorithm: take one of these, or give it a default"
                )

    def __call__(self, keys: Mapping[str, Any], **tensors: Tensor | None) -> Any:
        """Call the function with those of `tensors` and `keys` that it takes. An argument of None
        is left out if the parameter has a default.

        Raises UserError if a user's function raises an error, or returns tensors of a wrong number
        or shape, without a gradient, or not finite.
        """
        arguments = {name: tensors.get(name, keys.get(name)) for name in self.parameters}
        arguments = {
            name: value
            for name, value in arguments.items()
            if value is not None or name not in self.defaults
        }
        if not self.source:
            return self.function(**arguments)
        try:
            result = self.function(**arguments)
        except Interrupted:
            raise
        except BaseException as error:  # the user's function may raise anything
            stack = traceback.extract_tb(error.__traceback__)[1:]
            file = inspect.getfile(self.function)
            line = next(
                (f" in line {frame.lineno}" for frame in reversed(stack) if frame.filename == file), ""
            )
            raise UserError(f"{self.source} raised {type(error).__name__}{line}: {error}") from error
        inputs = [tensors.get(name) for name in arguments]
        self._check_result(result, [tensor for tensor in inputs if tensor is not None])
        return result

    def _check_result(self, result: Any, inputs: list[Tensor]) -> None:
        outputs = result if isinstance(result, tuple) else (result,)
        are_tensors = all(isinstance(output, torch.Tensor) for output in outputs)
        if len(outputs) != self.outputs or not are_tensors:
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise UserError(f"{self.source} returned {kinds}, but should return {self.RETURNS}")
        for output in outputs:
            if output.shape != inputs[0].shape:
                shapes = f"{list(output.shape)} for tensors of shape {list(inputs[0].shape)}"
                raise UserError(
                    f"{self.source} returned a tensor of shape {shapes}, but should return "
                    f"{self.RETURNS}"
                )
        if any(tensor.requires_grad for tensor in inputs) and not outputs[0].requires_grad:
            raise UserError(
                f"{self.source} returned a loss without a gradient: compute it from log_ratio or "
                "logprobs"
            )
        if all(value.isfinite().all() for value in inputs):
            bad = sum(int((~output.isfinite()).sum()) for output in outputs)
            if bad:
                count = sum(output.numel() for output in outputs)
                raise UserError(
                    f"{self.source} returned {bad} of {count} values that are not finite for finite "
                    "inputs"
                )


@dataclass(frozen=True)
class Advantage(Record):
    """An estimator of how much better an answer or a token was than expected.

    A function that takes `mask` works on tokens: all tensors are [B, T], and rewards are on the
    tokens that end a turn or the episode. Any other function compares the answers of a group, whose
    rewards are [1, G].
    """

    whitened: bool = False  # its results are normalised over the whole step
    turns: bool = False  # in a group, it also compares turns, with `advantages.turn_relative`
    # It also compares several rewards one by one, with `advantages.normalize_then_sum`
    sums: bool = False
    nonnegative: bool = False  # rewards must be at least 0
    OFFERED = ("rewards", "mask", "values", "old_logprobs", "teacher_logprobs")
    RETURNS = (
        "advantages of the shape of its inputs, or, if it takes values, a pair of advantages and returns"
    )

    @property
    def offered(self) -> tuple[str, ...]:
        """The tensors that this function may take: without a parameter `mask`, only rewards."""
        return self.OFFERED if self.by_token else ("rewards",)

    @property
    def outputs(self) -> int:
        """The number of tensors that the function returns: advantages, and with a critic also
        returns.
        """
        return 1 + self.takes("values")

    @property
    def by_token(self) -> bool:
        """True if the function works on tokens instead of the answers of a group."""
        return self.takes("mask")

    @property
    def compares(self) -> bool:
        """True if the function compares the answers to one prompt with each other."""
        return self.takes("rewards") and not self.by_token

    @property
    def by_turn(self) -> bool:
        """True if the function can take a separate reward for each turn."""
        return self.takes("rewards") and (self.by_token or self.turns)


@dataclass(frozen=True)
class Loss(Record):
    """A policy-gradient loss per token, [B, T] like all its inputs."""

    # True if the loss clips the ratio to a band around 1. Metrics then count the tokens whose ratio
    # between trainer and engine is outside of this band.
    band: bool = False
    OFFERED = ("log_ratio", "logprobs", "old_logprobs", "advantages", "mask")
    RETURNS = "a loss and a mask of the tokens it has bounded, both of the shape of its inputs"

    @property
    def outputs(self) -> int:
        """The number of tensors that the function returns: a loss, and a mask of bounded tokens."""
        return 2

    @property
    def has_ratios(self) -> bool:
        """True if the loss uses the ratio of the policy to the old policy."""
        return self.takes("log_ratio") or self.takes("old_logprobs")


@dataclass(frozen=True)
class Estimator(Record):
    """An estimator of KL per token."""

    in_loss: bool = True  # its gradient is useful
    in_reward: bool = False  # its expectation is exact


@dataclass(frozen=True)
class Level:
    """The level at which a ratio is computed: per token, or per answer, whose tokens then all have
    the same ratio.
    """

    meaning: str  # one line for --help
    by_answer: bool = False
    mean: bool = False  # the geometric mean over tokens, not their product
