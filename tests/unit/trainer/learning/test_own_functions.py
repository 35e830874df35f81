"""A loss and an advantage of the user's: the examples in steps of the learner, and what is said when one is wrong."""

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.support.learning_steps import TableCritic, TablePolicy, as_step, on_ranks, random_step
from tests.support.recipes import make_config
from trainer.algorithms import losses
from trainer.config.algorithm import check_algorithm
from trainer.errors import UserError
from trainer.learning import Learner
from trainer.types import MicroBatch

EXAMPLES = Path(__file__).parents[4] / "scripts" / "examples"
TAPERED = f"{EXAMPLES}/tapered_loss.py:tapered"
MEDIAN = f"{EXAMPLES}/median_baseline.py:median_baseline"


class Watched(TablePolicy):
    """A learner that keeps the batches of its updates and the losses of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[MicroBatch] = []
        self.before: list[torch.Tensor] = []

    def update(self, batches: list[MicroBatch], *arguments: Any) -> Any:
        self.batches += batches
        self.before += [self.table.clone()] * len(batches)
        return super().update(batches, *arguments)


def learned(policy: TablePolicy, critic: Any = None, **algorithm: Any) -> dict[str, float]:
    config = make_config(algorithm=algorithm, batch={"updates_per_step": 2})
    learner = Learner(config, policy, None, 0, critic=critic)  # type: ignore[arg-type]
    return learner.learn(*as_step(random_step(4, 4, seed=1)), step=1)


def problems(**algorithm: Any) -> list[str]:
    return list(
        check_algorithm(make_config(algorithm=algorithm).algorithm, updates=2, shared_critic=False)
    )


def test_a_step_with_the_example_loss_equals_a_loop_over_tokens() -> None:
    policy = Watched()
    metrics = learned(policy, loss=TAPERED, ratio_level="sequence", num_iterations=2, tis_cap=None)
    total, bounded, tokens = 0.0, 0, 0
    sizes = [sum(int(b.loss_mask.sum()) for b in policy.batches[i : i + 1]) for i in range(4)]
    assert len(policy.batches) == 4 and sizes[:2] == sizes[2:]
    for batch, table, size in zip(policy.batches, policy.before, sizes, strict=True):
        assert batch.old_logprobs is not None
        new = policy.outputs(table, batch, 1.0).logprobs
        for row, mask in enumerate(batch.loss_mask.bool()):
            ratio = (
                math.exp((new[row][mask] - batch.old_logprobs[row][mask]).sum()) if mask.any() else 1.0
            )
            for advantage, logprob in zip(batch.advantages[row][mask], new[row][mask], strict=True):
                weight = 1.0 if advantage >= 0 else min(ratio, 1.0)
                total -= weight * float(advantage) * float(logprob) / size / 4
                bounded, tokens = bounded + (float(advantage) < 0 and ratio > 1), tokens + 1
    assert metrics["loss"] == pytest.approx(total, rel=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(bounded / tokens) and 0 < bounded < tokens


def test_a_step_with_the_example_of_an_advantage_learns_from_distances_to_the_median() -> None:
    for normalize in (True, False):
        policy = Watched()
        assert learned(policy, advantage=MEDIAN, normalize_std=normalize)["updates"] == 2
        step = random_step(4, 4, seed=1)
        failed = {(t.prompt_index, t.sample_index) for t in step if t.error}
        episodes = {(t.prompt_index, t.sample_index): t.reward for t in step}
        expected = []
        for prompt in range(4):
            rewards = [r for (p, s), r in episodes.items() if p == prompt and (p, s) not in failed]
            distances = [r - median(rewards) for r in rewards]
            scale = sum(map(abs, distances)) / len(rewards) + 1e-6 if normalize else 1.0
            expected += [d / scale for d in distances]
        got = {round(float(a), 4) for b in policy.batches for a in b.advantages[b.loss_mask.bool()]}
        assert got == {round(x, 4) + 0.0 for x in expected} and len(got) > 4


def test_a_custom_function_may_take_keys_and_has_a_record_like_others(tmp_path: Path) -> None:
    """The clipped loss under another name gives the same loss; an advantage function that takes values gets a
    critic.
    """
    (tmp_path / "own.py").write_text(
        "from trainer.algorithms import advantages, losses\n"
        "def clipped(log_ratio, advantages, clip_low, clip_high=0.28):\n"
        "    return losses.clipped_surrogate(log_ratio, advantages.detach(), clip_low, clip_high)\n"
        "def with_critic(rewards, values, mask, gamma, gae_lambda, scale=1.0):\n"
        "    return advantages.gae(rewards * scale, values, mask, gamma, gae_lambda)\n"
    )
    ours, theirs = TablePolicy(), TablePolicy()
    settings = {"clip_low": 0.1, "clip_high": 0.28, "num_iterations": 2}
    custom_settings = {**settings, "clip_high": None, "loss": f"{tmp_path}/own.py:clipped"}
    figures = learned(ours, **settings), learned(theirs, **custom_settings)
    assert torch.equal(ours.table, theirs.table)
    assert {k for k in figures[0] if figures[0][k] != figures[1][k]} <= {"gap/outside_clip"}
    assert problems(**custom_settings) == []

    critic, same = TableCritic(), TableCritic()
    learned(TablePolicy(), critic, advantage=f"{tmp_path}/own.py:with_critic")
    own_returns = critic.table
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.learning.credit._whiten", lambda batches: None)
        learned(TablePolicy(), same, advantage="gae")
    assert torch.equal(own_returns, same.table)
    (message,) = problems(loss=f"{tmp_path}/own.py:clipped", sapo_temperatures=[1, 2])
    assert (
        message.startswith("algorithm.sapo_temperatures is set, but algorithm.loss is ")
        and "belongs to sapo" in message
    )


WRONG = """
import torch
def no_ratios(logprobs, advantages): return -logprobs * advantages, advantages > 9
def unknown(log_ratio, rewards_of_others): ...
def starred(*tensors): ...
def whole_step(rewards, values): ...
def raises(log_ratio, advantages): return torch.zeros(3) + torch.zeros(4)
def alone(log_ratio, advantages): return -log_ratio * advantages
def number(log_ratio, advantages): return 0.0, None
def summed(log_ratio, advantages): return (log_ratio * advantages).sum(), advantages > 9
def detached(log_ratio, advantages): return -log_ratio.detach() * advantages, advantages > 9
def endless(log_ratio, advantages): return log_ratio / 0 * advantages, advantages > 9
def flat(rewards): return rewards[0]
def undefined(rewards): return rewards / 0
def text(rewards, mask): return "much"
def ends(rewards): raise SystemExit(0)
seven = 7
"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong.py").write_text(WRONG)
    return f"{tmp_path}/wrong.py"


@pytest.mark.parametrize(
    ("key", "name", "sentence"),
    [
        (
            "loss",
            "unknown",
            "asks for rewards_of_others, but gets log_ratio, logprobs, old_logprobs, adv",
        ),
        ("loss", "starred", "takes *tensors, but is called by name"),
        ("loss", "seven", "has no signature to read: name a Python function"),
        ("loss", "rasies", "has no 'rasies'; did you mean raises?"),
        ("loss", "no_ratios", "without ratios only the first update"),
        (
            "advantage",
            "whole_step",
            "asks for values, but without mask gets rewards and keys of the section",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_loads(
    wrong: str, key: str, name: str, sentence: str
) -> None:
    (message,) = problems(**{key: f"{wrong}:{name}"})
    assert (
        message.startswith(f"algorithm.{key}")
        and wrong in message
        and sentence in message
        and len(message) < 400
    ), message


def test_a_missing_file_is_named() -> None:
    assert problems(loss="nowhere/loss.py:f") == [
        "algorithm.loss: 'nowhere/loss.py:f' cannot be loaded: there is no file nowhere/loss.py"
    ]


@pytest.mark.parametrize(
    ("key", "name", "sentence"),
    [
        ("loss", "raises", "raised RuntimeError in line 7: The size of tensor a (3) must match"),
        (
            "loss",
            "alone",
            "returned Tensor, but should return a loss and a mask of the tokens it has bounded",
        ),
        ("loss", "number", "returned float, NoneType, but should return a loss and a mask"),
        ("loss", "summed", "returned a tensor of shape [] for tensors of shape ["),
        (
            "loss",
            "detached",
            "returned a loss without a gradient: compute it from log_ratio or logprobs",
        ),
        ("loss", "endless", "values that are not finite"),
        ("advantage", "flat", "returned a tensor of shape [4] for tensors of shape [1, 4]"),
        ("advantage", "undefined", "values that are not finite"),
        ("advantage", "text", "returned str, but should return advantages"),
        ("advantage", "ends", "raised SystemExit in line 16: 0"),
    ],
)
def test_a_function_with_invalid_results_is_named_in_one_sentence(
    wrong: str, key: str, name: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        learned(TablePolicy(), **{key: f"{wrong}:{name}"})
    message = str(caught.value)
    assert (
        message.startswith(f"algorithm.{key}: {wrong}:{name} ")
        and sentence in message
        and "\n" not in message
    ), message


def test_inputs_that_are_not_finite_are_not_blamed_on_the_function(wrong: str) -> None:
    record = make_config(algorithm={"loss": f"{wrong}:alone"}).algorithm.loss_record
    ratio = torch.tensor([[math.nan, 1.0]], requires_grad=True)
    with pytest.raises(UserError, match="should return a loss and a mask"):
        record({}, log_ratio=ratio, advantages=torch.ones(1, 2))
    record = make_config(algorithm={"loss": TAPERED}).algorithm.loss_record
    loss, _ = record({}, log_ratio=ratio, logprobs=ratio, advantages=torch.ones(1, 2))
    assert loss.isnan().any()


def test_custom_functions_give_the_same_result_on_one_and_two_ranks() -> None:
    def table() -> torch.Tensor:
        policy = TablePolicy()
        learned(policy, loss=TAPERED, advantage=MEDIAN, num_iterations=2)
        return policy.table

    alone = table()
    for other in on_ranks(2, table):
        torch.testing.assert_close(other, alone, rtol=1e-5, atol=1e-7)


def test_every_built_in_loss_takes_only_offered_tensors() -> None:
    for name, loss in losses.LOSSES.items():
        loss.check_signature(type(make_config().algorithm).model_fields)
        assert name in losses.LOSSES and loss.takes("advantages")
