"""Compare three optimizer steps of any policy with three in plain Transformers and torch, in one process."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import policy_checks as checks
from trainer.policy import UpdateStats
from trainer.types import Sample

# Every part of a step has an effect: warm-up, schedule, decay, and a norm that the gradient exceeds. AdamW divides by
# epsilon, which is large so that a rounding error in a gradient (a key's bias has no other) stays small in the weights.
SETTINGS: dict[str, Any] = {
    "max_grad_norm": 2.0,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "schedule": "linear",
    "lr": 1e-3,
    "eps": 1e-3,
}
PLACES = [0, 1, 2.6]  # positions in the run, which ends one update after warm-up
RATES = [1e-3 / 3, 2e-3 / 3, 0.4e-3]


@dataclass
class Step:
    """One step's figures, the gradients before clipping, and the weights after the step."""

    loss: float
    norm: float
    rate: float
    place: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def plain_adamw(named: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """AdamW with SETTINGS; biases and norms do not decay."""
    decayed, others = (
        [p for p in named.values() if (p.dim() > 1) == matrix] for matrix in (True, False)
    )
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    options = {"betas": (0.9, 0.99), "eps": SETTINGS["eps"], "weight_decay": SETTINGS["weight_decay"]}
    return [torch.optim.AdamW(groups, **options)]


def plain_steps(
    folder: Path,
    samples: list[Sample],
    make: Callable[[dict[str, Any]], list[torch.optim.Optimizer]] = plain_adamw,
) -> Iterator[Step]:
    """Yield the textbook steps with the optimizers that `make` makes, on the loss of `policy_checks.make_loss`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizers = make(dict(model.named_parameters()))
    for rate, place in zip(RATES, PLACES, strict=True):
        loss = checks.plain_loss(model, samples, "token_mean")
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        yield Step(loss.item(), norm.item(), rate, place, gradients, weights)


def check_next_steps(policy: Any, source: Path, first: int, last: int) -> None:
    """Check that steps `first` to `last` of 3 under FSDP2 are those of a single process."""
    expected = itertools.islice(plain_steps(source, checks.make_samples()), first - 1, last)
    check_steps(policy, fsdp_gradient, checks.weights, list(expected))


def check_steps(
    policy: Any,
    gradient: Callable[[Any], Tensor | None],
    masters: Callable[[Any], dict[str, Tensor]],
    expected: list[Step],
    slack: float = 1.0,
) -> None:
    """The policy's next steps are the expected ones, on all ranks together, to `slack` times float32 rounding.

    Args:
        gradient: returns a parameter's whole gradient, once backward is over.
        masters: returns whole weights by name.
    """
    batches = checks.own_batches(checks.make_samples(), 20, packing=True)
    assert len(batches) > 1
    for step in expected:
        got: dict[str, Tensor] = {}
        stats = update_and_look(policy, batches, gradient, step.place, got)
        assert stats.loss == pytest.approx(step.loss, rel=2e-5 * slack, abs=1e-6 * slack)
        assert (
            stats.grad_norm == pytest.approx(step.norm, rel=2e-5 * slack)
            and step.norm > SETTINGS["max_grad_norm"]
        )
        assert stats.learning_rate == pytest.approx(step.rate) and not stats.skipped
        checks.assert_gradients_equal(got, step.gradients, tolerance=1e-5 * slack)
        for name, weight in masters(policy).items():
            torch.testing.assert_close(
                weight,
                step.weights[name],
                atol=2e-6 * slack,
                rtol=1e-5 * slack,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def update_and_look(
    policy: Any,
    batches: list[Any],
    gradient: Callable[[Any], Tensor | None],
    place: float,
    got: dict[str, Tensor],
) -> UpdateStats:
    """Make an update, and put its whole gradients, before clipping, into `got`."""
    name = "step" if hasattr(policy, "step") else "_step"  # of DeepSpeed's policy
    apply = getattr(policy, name)

    def look_and_apply(*arguments: Any) -> UpdateStats:
        gradients = {key: gradient(p) for key, p in policy.named_parameters()}
        got.update({key: g.detach().clone() for key, g in gradients.items() if g is not None})
        return apply(*arguments)

    setattr(policy, name, look_and_apply)
    stats: UpdateStats = policy.update(batches, checks.make_loss(batches), checks.TEMPERATURE, place)
    delattr(policy, name)
    return stats


def fsdp_gradient(parameter: Any) -> Tensor | None:
    """Return the whole gradient of a sharded parameter."""
    return None if parameter.grad is None else parameter.grad.full_tensor()
