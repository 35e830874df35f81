"""Checks of the keys of the optimizer, without torch."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.config.schema import PolicyConfig
from trainer.errors import quoted

_MOST_ITERATIONS = 30  # of Muon; 5 are usual
_LARGEST_FACTOR = 2.0  # of a direction's singular values, which should be near 1


def check_optimizer(policy: PolicyConfig) -> Iterator[str]:
    """Check the optimizer's keys; `trainer.policy.optimizer_choice.try_optimizer` later tries its
    class.
    """
    named = f"policy.optimizer is {policy.optimizer}"
    options = policy.optimizer_options
    if policy.optimizer == "adamw":
        if options:
            yield (
                f"policy.optimizer_options is set, but {named}, whose keys are policy.betas and eps: "
                "leave it out"
            )
        return
    if policy.backend != "fsdp":
        yield (
            f"{named}, but DeepSpeed's ZeRO is for adamw here: set policy.backend to fsdp, or leave it "
            "out"
        )
    if policy.update_on == "host":
        yield f"{named}, which is not for policy.update_on: host: set that to device, or leave it out"
    if policy.expert_parallel > 1:
        yield f"{named}, which is untried with policy.expert_parallel: leave one of them out"
    for key in sorted(options.keys() & {"params", "lr", "weight_decay"}):
        yield (
            f"policy.optimizer_options has {key}, which policy.lr and policy.weight_decay decide: leave "
            "it out"
        )
    if policy.optimizer == "muon":
        for key, requirement in _muon_requirements(options).items():
            value = quoted(options[key])
            yield (
                f"policy.optimizer_options: {key} is {value}, but should be {requirement}: correct it "
                "or leave it out"
            )
    for key in ("betas", "eps") if ":" in policy.optimizer else ():
        if getattr(policy, key) != PolicyConfig.model_fields[key].default:
            yield (
                f"policy.{key} is set, but {named}: put what it takes into policy.optimizer_options "
                "instead"
            )


def _muon_requirements(options: dict[str, Any]) -> dict[str, str]:
    """Return what each of Muon's options should be that is something else."""
    requirements: dict[str, str] = {}
    steps = options.get("ns_steps", 5)
    if type(steps) is not int or not 1 <= steps <= _MOST_ITERATIONS:
        requirements["ns_steps"] = f"a whole number from 1 to {_MOST_ITERATIONS}"
    if "momentum" in options and not (_is_number(options["momentum"]) and 0 <= options["momentum"] < 1):
        requirements["momentum"] = "a number from 0 to below 1"
    if "eps" in options and not (_is_number(options["eps"]) and 0 < options["eps"] < 1):
        requirements["eps"] = "a number above 0 and below 1"
    if not isinstance(options.get("nesterov", True), bool):
        requirements["nesterov"] = "true or false"
    if "ns_coefficients" in options and "ns_steps" not in requirements:
        coefficients = options["ns_coefficients"]
        are_three = isinstance(coefficients, list | tuple) and len(coefficients) == 3
        if not are_three or not all(map(_is_number, coefficients)):
            requirements["ns_coefficients"] = "three finite numbers"
        elif (factor := _useless_factor(coefficients, steps)) is not None:
            requirements["ns_coefficients"] = (
                f"three numbers a, b, c such that a x + b x³ + c x⁵, applied {steps} times, brings "
                f"each x from 0 to 1 near 1 (one becomes {factor:.3g})"
            )
    return requirements


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e6 and not math.isnan(value)


def _useless_factor(coefficients: Sequence[float], steps: int) -> float | None:
    """Return what Muon's iterations make of a singular value where that is negative, zero or large;
    None elsewhere.
    """
    a, b, c = coefficients
    for hundredths in range(1, 101):
        x = hundredths / 100
        for _ in range(steps):
            x = a * x + b * x**3 + c * x**5
            if abs(x) > 1e30:  # its fifth power would overflow
                return x
        if not 0 < x <= _LARGEST_FACTOR:
            return x
    return None
