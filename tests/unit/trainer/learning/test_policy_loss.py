"""The loss, put together from its parts, equals a loop over tokens that knows nothing of them."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.algorithm import AlgorithmConfig
from trainer.learning.groups import MiniBatch
from trainer.learning.policy_loss import CriticLoss, PolicyLoss
from trainer.policy.packing import make_layout
from trainer.types import MicroBatch, Outputs

LONGEST = 9


def make_batch(seed: int = 0) -> tuple[MicroBatch, Outputs]:
    """Return four rows, the last without a trainable token, with ratios of all sizes and every column a step
    can have.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(4, 6, generator=generator, dtype=torch.float64)

    mask = (torch.rand(4, 6, generator=generator) > 0.3).double()
    mask[3] = 0
    new = noise(0.5) - 1
    batch = MicroBatch(
        torch.zeros(4, 7, dtype=torch.int64),
        mask,
        new + noise(0.3),
        noise(1.0),
        [7] * 4,
        make_layout(mask, [7] * 4),
        [0, 1, 2, 3],
        new + noise(0.4),
        new + noise(0.3),
        torch.rand(4, 6, generator=generator) > 0.5,
        noise(1.0),
        noise(1.0),
    )
    return batch, Outputs(
        new.requires_grad_(), noise(1.0).abs().requires_grad_(), noise(1.0).requires_grad_()
    )


def minibatch(batch: MicroBatch) -> MiniBatch:
    return MiniBatch([], [batch], tokens=17, sequences=5)


class Loop:
    """A second computation of the loss, token by token in scalars."""

    def __init__(self, config: AlgorithmConfig, batch: MicroBatch, outputs: Outputs) -> None:
        self.config, self.batch, self.outputs = config, batch, outputs

    def total(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, row in enumerate(self.batch.loss_mask):
            for t in range(len(row)):
                if row[t]:
                    total = total + self.token(i, t) * self.weight(int(row.sum()))
        return total

    def weight(self, tokens: int) -> float:
        return {
            "token_mean": 1 / 17,
            "sequence_mean": 1 / tokens / 5,
            "sequence_sum": 1 / 5,
            "fixed_length": 1 / 5 / LONGEST,
        }[self.config.aggregation]

    def token(self, i: int, t: int) -> Tensor:
        config, batch = self.config, self.batch
        assert (
            batch.old_logprobs is not None
            and batch.ref_logprobs is not None
            and batch.high_entropy is not None
        )
        new, old, engine = (
            self.outputs.logprobs[i, t],
            batch.old_logprobs[i, t],
            batch.engine_logprobs[i, t],
        )
        loss = (
            self.surrogate(i, t)
            * self.correction(i, t, float(old - engine))
            * float(batch.high_entropy[i, t])
        )
        d = batch.ref_logprobs[i, t] - new
        estimates = {
            "k2": d**2 / 2,
            "k3": d.exp() - d - 1,
            "unbiased_k3": (new - old).exp() * (d.exp() - d - 1),
        }
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * estimates[config.kl_estimator]
        return loss - config.entropy_coef * self.outputs.entropy[i, t]

    def surrogate(self, i: int, t: int) -> Tensor:
        config, advantage = self.config, float(self.batch.advantages[i, t])
        new, ratio = self.outputs.logprobs[i, t], self.ratio(i, t)
        if config.loss == "reinforce":
            return -advantage * new
        if config.loss == "sapo":
            assert config.sapo_temperatures is not None
            temperature = config.sapo_temperatures[0 if advantage > 0 else 1]
            return -4 / temperature / (1 + (-temperature * (ratio - 1)).exp()) * advantage
        assert config.clip_low is not None and config.clip_high is not None
        bounded = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
        if config.loss == "cispo":
            return -bounded * advantage * new
        gain = (
            ratio * advantage
            if ratio.item() * advantage <= bounded * advantage
            else torch.tensor(bounded * advantage)
        )
        if config.dual_clip is not None and advantage < 0 and gain.item() < config.dual_clip * advantage:
            gain = torch.tensor(config.dual_clip * advantage)
        return -gain

    def ratio(self, i: int, t: int) -> Tensor:
        assert self.batch.old_logprobs is not None
        row = self.batch.loss_mask[i].bool()
        logs = (self.outputs.logprobs[i] - self.batch.old_logprobs[i])[row]
        level = self.config.ratio_level
        log_ratio = self.outputs.logprobs[i, t] - self.batch.old_logprobs[i, t]
        value = {"token": log_ratio, "geometric": logs.mean(), "sequence": logs.sum()}[level].detach()
        # The value of the sequence, the gradient of the token
        return (value + log_ratio - log_ratio.detach()).exp()

    def correction(self, i: int, t: int, difference: float) -> float:
        config, batch = self.config, self.batch
        assert batch.old_logprobs is not None
        row = batch.loss_mask[i].bool()
        logs = (batch.old_logprobs[i] - batch.engine_logprobs[i])[row]
        levels = {"token": difference, "geometric": float(logs.mean()), "sequence": float(logs.sum())}
        weight = (
            1.0 if config.tis_cap is None else min(math.exp(levels[config.tis_level]), config.tis_cap)
        )
        if config.keep_band is not None:
            weight *= config.keep_band[0] <= math.exp(levels[config.keep_level]) <= config.keep_band[1]
        if config.stale_threshold is not None and batch.advantages[i, t] < 0:
            moved = (batch.engine_logprobs[i] - self.outputs.logprobs[i])[row].mean().item()
            weight *= moved <= config.stale_threshold
        return weight


CASES: list[dict[str, Any]] = [
    {},
    {"aggregation": "sequence_mean", "dual_clip": 1.5, "tis_cap": None},
    {"aggregation": "fixed_length", "ratio_level": "geometric", "tis_level": "sequence", "tis_cap": 1.2},
    {"aggregation": "sequence_sum", "ratio_level": "sequence", "keep_band": [0.7, 1.4]},
    {
        "loss": "cispo",
        "clip_low": 0.3,
        "clip_high": 0.2,
        "keep_band": [0.9, 1.1],
        "keep_level": "geometric",
    },
    {"loss": "sapo", "kl_coef": 0.3, "kl_estimator": "unbiased_k3"},
    {"loss": "reinforce", "kl_coef": 0.3, "kl_estimator": "k1", "kl_in": "reward"},
    {"kl_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.1, "stale_threshold": 0.02},
    {"kl_coef": 0.2, "entropy_coef": 0.1, "aggregation": "sequence_mean", "tis_level": "geometric"},
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_a_loop_over_tokens(case: dict[str, Any], seed: int) -> None:
    config = AlgorithmConfig(**case)
    batch, outputs = make_batch(seed)
    outputs.values = None
    loss, sums = PolicyLoss(config, minibatch(batch), LONGEST)(batch, outputs)
    expected = Loop(config, batch, outputs).total()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    leaves = [outputs.logprobs, outputs.entropy]
    for got, wanted in zip(
        torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, leaves, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    assert sums["tokens"] == batch.loss_mask.sum()
    assert sums["decisive"] == (batch.high_entropy & batch.loss_mask.bool()).sum()  # type: ignore[operator]


@pytest.mark.parametrize("clip", [0.3, None])
def test_values_are_learned_beside_the_policy_or_alone(clip: float | None) -> None:
    """The value loss equals max((v - R)^2, (v clipped to its old value - R)^2) / 2 over all tokens, by a loop."""
    config = AlgorithmConfig(advantage="gae", value_clip=clip, value_coef=0.7)
    batch, outputs = make_batch()
    assert outputs.values is not None and batch.returns is not None and batch.old_values is not None
    expected = 0.0
    for i, t in batch.loss_mask.nonzero().tolist():
        value, old, goal = (x[i, t].item() for x in (outputs.values, batch.old_values, batch.returns))
        moved = old + max(-clip, min(clip, value - old)) if clip else value
        expected += max((value - goal) ** 2, (moved - goal) ** 2) / 2 / 17
    alone, sums = CriticLoss(config, minibatch(batch))(batch, outputs.values)
    assert alone.item() == pytest.approx(expected) and sums["value/tokens"] == batch.loss_mask.sum()
    together, _ = PolicyLoss(config, minibatch(batch), LONGEST)(batch, outputs)
    outputs.values = None
    policy, _ = PolicyLoss(config, minibatch(batch), LONGEST)(batch, outputs)
    assert (together - policy).item() == pytest.approx(0.7 * expected)


def test_the_forward_pass_stands_for_missing_old_logprobs() -> None:
    batch, outputs = make_batch()
    outputs.values, old = None, outputs.logprobs.detach()
    loss, _ = PolicyLoss(AlgorithmConfig(), minibatch(batch), LONGEST)(batch, outputs)
    assert loss.item() != 0
    batch.old_logprobs = None
    once = PolicyLoss(AlgorithmConfig(), minibatch(batch), LONGEST)
    single, sums = once(batch, outputs)
    batch.old_logprobs = old
    again, _ = PolicyLoss(AlgorithmConfig(), minibatch(batch), LONGEST)(batch, outputs)
    assert single.item() == again.item() and sums["clipped"] == 0
    torch.testing.assert_close(once.gaps[0][0], old[batch.loss_mask.bool()])


ROTTEN = [float("nan"), float("inf"), float("-inf")]


def spoiled(
    tensors: MicroBatch | Outputs, mask: Tensor, name: str, value: float
) -> MicroBatch | Outputs:
    """Return a copy with `value` in one tensor wherever the mask is 0; tensors keep their gradients."""
    tensor = getattr(tensors, name)
    rotten = torch.where(mask.bool(), tensor.detach(), value).requires_grad_(tensor.requires_grad)
    return replace(tensors, **{name: rotten})


def per_token_names(tensors: MicroBatch | Outputs) -> list[str]:
    """Return the names of all tensors that hold a number for every target."""
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    return [
        n
        for n, x in values.items()
        if isinstance(x, Tensor) and x.is_floating_point() and n != "loss_mask"
    ]


@pytest.mark.parametrize("value", ROTTEN)
@pytest.mark.parametrize(
    "case", [*CASES, {"advantage": "gae", "value_clip": None, "high_entropy_share": 0.5}]
)
def test_masked_values_that_are_not_finite_never_reach_loss_or_gradient(
    case: dict[str, Any], value: float
) -> None:
    config = AlgorithmConfig(**case)
    batch, outputs = make_batch()

    def computed(batch: MicroBatch, outputs: Outputs) -> list[Tensor]:
        """Return the loss, its figures, its gradients by all outputs, and the values that the engine is
        compared with.
        """
        policy_loss = PolicyLoss(config, minibatch(batch), LONGEST)
        loss, sums = policy_loss(batch, outputs)
        leaves = [outputs.logprobs, outputs.entropy, outputs.values]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        alone, value_sums = CriticLoss(config, minibatch(batch))(batch, outputs.values)  # type: ignore[arg-type]
        figures = [*sums.values(), *value_sums.values(), *policy_loss.gaps[0]]
        return [loss, alone, *torch.autograd.grad(alone, outputs.values), *gradients, *figures]  # type: ignore[arg-type]

    expected = computed(batch, outputs)
    assert all(torch.isfinite(tensor).all() for tensor in expected)
    names = per_token_names(batch), per_token_names(outputs)
    assert names == (
        ["engine_logprobs", "advantages", "old_logprobs", "ref_logprobs", "old_values", "returns"],
        ["logprobs", "entropy", "values"],
    )
    cases = [(spoiled(batch, batch.loss_mask, name, value), outputs) for name in names[0]]
    cases += [(batch, spoiled(outputs, batch.loss_mask, name, value)) for name in names[1]]
    for rotten_batch, rotten_outputs in cases:
        for got, wanted in zip(computed(rotten_batch, rotten_outputs), expected, strict=True):  # type: ignore[arg-type]
            assert torch.equal(got, wanted)
