"""Checks of the critic for test_critic.py, on one or several ranks: values against a plain trunk and a linear head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from sharding.ranks import all_reduce_sum, world_size
from tests.support import policy_checks as checks
from trainer.config.schema import ModelConfig, PolicyConfig
from trainer.policy import FsdpPolicy, Outputs
from trainer.policy.critic import Critic
from trainer.policy.fsdp import ShardedModel
from trainer.run import checkpoint
from trainer.types import MicroBatch, Sample

GOAL = 0.7


def make_reward_model(folder: Path, kind: str) -> Path:
    """Make a random classifier with one label on the trunk of `kind`."""
    torch.manual_seed(3)
    source = checks.model_folder(folder, kind, False)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / f"{kind}_reward")
    return folder / f"{kind}_reward"


def make_critic(source: Path, **settings: Any) -> Critic:
    """Return a critic in float32 whose gradients are not clipped."""
    settings = {"dtype": "float32", "lr": 1e-3, "max_grad_norm": 1e9} | settings
    return Critic(ModelConfig(path=str(source)), PolicyConfig(**settings), checks.CPU)


def squared_error(
    batches: list[MicroBatch],
) -> Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]:
    """Return a loss for critics: the mean squared distance of values from GOAL, over all ranks' trainable tokens."""
    tokens = all_reduce_sum({"n": float(sum(batch.loss_mask.sum() for batch in batches)) / checks.ways})[
        "n"
    ]
    return lambda batch, values: (
        (((values - GOAL) ** 2) * batch.loss_mask).sum() / tokens,
        {"n": batch.loss_mask.sum()},
    )


class Plain(nn.Module):
    """A trunk and a linear head from Transformers and torch, applied to one sequence at a time."""

    def __init__(self, source: Path, head: Tensor) -> None:
        super().__init__()
        self.trunk = AutoModel.from_pretrained(source, dtype=torch.float32)
        self.head = nn.Linear(head.shape[1], 1, bias=False)
        self.head.weight = nn.Parameter(head.clone())

    def values(self, sample: Sample) -> Tensor:
        """Return values of the states in which tokens 1, 2, … were sampled."""
        ids = torch.tensor([sample.input_ids])
        return self.head(self.trunk(ids).last_hidden_state)[0, :-1, 0]

    def gradients(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Gradients of the mean squared error over trainable tokens, under the classifier's names."""
        masks = [torch.tensor(s.loss_mask[1:]).bool() for s in samples]
        errors = [(self.values(s)[m] - GOAL) ** 2 for s, m in zip(samples, masks, strict=True)]
        torch.cat(errors).mean().backward()
        trunk = {f"model.{name}": p.grad for name, p in self.trunk.named_parameters()}
        return {**trunk, "score.weight": self.head.weight.grad}


def captured_gradients(model: ShardedModel, update: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the gradients that an update applies, gathered."""
    captured: dict[str, Tensor] = {}

    def capture(*_: Any) -> None:
        learned = {name: p.grad for name, p in model.trained().items() if p.grad is not None}
        captured.update({name: gradient.full_tensor().clone() for name, gradient in learned.items()})

    handle = model.optimizer.register_step_pre_hook(capture)
    update()
    handle.remove()
    return captured


def check_values_and_gradients(folder: Path, kind: str, **settings: Any) -> None:
    """A reward model that is trained further as a critic has the plain model's values and gradients."""
    source, samples = folder / f"{kind}_reward", checks.make_samples()
    critic, batches = make_critic(source, **settings), checks.own_batches(samples, 33, packing=True)
    head = critic.trained()["score.weight"].detach().full_tensor()
    plain = Plain(source, head)
    assert head.abs().max() > 0.1
    mine = checks.own_samples(samples)
    for batch, values in zip(batches, critic.score(batches), strict=True):
        for row, index in enumerate(batch.rows):
            mask = torch.tensor(mine[index].loss_mask[1:])
            wanted = plain.values(mine[index]) * mask
            torch.testing.assert_close(values[row, : len(mask)], wanted, atol=2e-5, rtol=1e-5)
            assert not values[row, len(mask) :].any()
    got = captured_gradients(critic, lambda: critic.update(batches, squared_error(batches)))
    checks.assert_gradients_equal(got, plain.gradients(samples))


def check_head_on_shared_trunk(folder: Path, **settings: Any) -> None:
    """Both heads on one trunk have the plain values and gradients; the export has no value head.

    They are compared after an update has moved the value head off zero.
    """
    source, samples = checks.model_folder(folder), checks.make_samples()
    settings = {"dtype": "float32", "lr": 1e-2, "max_grad_norm": 1e9} | settings
    policy = FsdpPolicy(
        ModelConfig(path=str(source)), PolicyConfig(**settings), checks.CPU, value_head=True
    )
    batches = checks.own_batches(samples, 33)
    error = squared_error(batches)

    def loss_fn(batch: MicroBatch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.values is not None
        return error(batch, outputs.values)

    assert not any(outputs.values.any() for outputs in policy.score(batches, 1.0))
    policy.update(batches, loss_fn, 1.0)
    target = folder / f"shared_{world_size()}_{checks.ways}"
    policy.save_pretrained(target)
    plain = Plain(target, policy.trained()["value_head.weight"].detach().full_tensor())
    got = captured_gradients(policy, lambda: policy.update(batches, loss_fn, 1.0))
    expected = plain.gradients(samples)
    expected["value_head.weight"] = expected.pop("score.weight")
    checks.assert_gradients_equal(got, expected)
    assert "value_head.weight" not in dict(policy.named_parameters())


def check_state(folder: Path, **settings: Any) -> None:
    """A critic restored from a checkpoint makes the same next update, bit for bit."""
    source, batches = checks.model_folder(folder), checks.own_batches(checks.make_samples(), 60)
    first, second = make_critic(source, **settings), make_critic(source, **settings)
    assert not any(values.any() for values in first.score(batches)), "a new head must be zeros"
    for _ in range(2):
        first.update(batches, squared_error(batches))
    path = checkpoint.save(folder / f"critic_{world_size()}", 1, {"critic": first}, {})
    checkpoint.load(path, {"critic": second})
    assert second.version == 2
    assert first.update(batches, squared_error(batches)) == second.update(
        batches, squared_error(batches)
    )
    restored = second.trained()
    for name, parameter in first.trained().items():
        assert torch.equal(parameter.detach().full_tensor(), restored[name].detach().full_tensor()), name
