"""Learning rate and AdamW equal the plain formulas."""

import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from trainer.config.schema import PolicyConfig
from trainer.policy.optimizer import learning_rate_factor, make_adamw


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_without_warm_up_are_those_of_transformers(schedule: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=20)
    for update in range(21):
        assert learning_rate_factor(update, update, 0, 20, schedule) == pytest.approx(
            theirs.get_last_lr()[0], abs=1e-12
        )
        optimizer.step()
        theirs.step()


def test_warm_up_starts_above_zero_and_ends_at_the_peak() -> None:
    factors = [learning_rate_factor(update, update, 4, 10, "linear") for update in range(12)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0])
    assert learning_rate_factor(3, 3, 3, 3, "cosine") == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_to_the_end_of_the_run_however_many_updates_were_left_out(schedule: str) -> None:
    """Four updates a step are planned. Steps do fewer, or none, yet each begins at its place in the run."""
    done, rates = 0, []
    for step, updates in enumerate([4, 2, 0, 3, 1, 4]):
        for number in range(updates):
            place = 4 * step + 4 * number / updates
            rates.append(learning_rate_factor(done, place, 0, 24, schedule))  # type: ignore[arg-type]
            share = (step + number / updates) / 6
            expected = 1 - share if schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
            assert rates[-1] == pytest.approx(expected)
            done += 1
    assert rates == sorted(rates, reverse=True) and learning_rate_factor(
        done, 24, 0, 24, schedule
    ) == pytest.approx(0)  # type: ignore[arg-type]


def test_warm_up_counts_applied_updates_alone() -> None:
    """Warm-up has just begun after five of six steps without an update, although the run is nearly over."""
    assert learning_rate_factor(0, 5, 2, 6, "constant") == pytest.approx(1 / 3)
    assert learning_rate_factor(0, 5, 2, 6, "linear") == pytest.approx(min(1 / 3, 1 / 4))


def test_adamw_follows_the_formula() -> None:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    lr, (b1, b2), eps, decay = 0.1, (0.9, 0.95), 1e-8, 0.5
    optimizer = make_adamw(
        [matrix, vector], PolicyConfig(lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    )
    expected = [p.detach().double().clone() for p in (matrix, vector)]
    m, v = [torch.zeros_like(e) for e in expected], [torch.zeros_like(e) for e in expected]
    for step in range(1, 4):
        for i, p in enumerate((matrix, vector)):
            p.grad = torch.randn_like(p)
            g = p.grad.double()
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            expected[i] *= 1 - lr * (decay if i == 0 else 0.0)  # biases and norms are not decayed
            expected[i] -= lr * (m[i] / (1 - b1**step)) / (v[i].div(1 - b2**step).sqrt() + eps)
        optimizer.step()
    for p, e in zip((matrix, vector), expected, strict=True):
        torch.testing.assert_close(p.detach().double(), e, atol=1e-6, rtol=1e-6)


def test_state_is_there_before_the_first_step() -> None:
    parameter = nn.Parameter(torch.randn(2, 2))
    optimizer = make_adamw([parameter], PolicyConfig(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0))
    state = optimizer.state[parameter]
    assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), torch.float32
    )
    assert not state["exp_avg"].requires_grad and math.isclose(float(state["step"]), 0.0)
