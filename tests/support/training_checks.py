"""Data for `hotbunk.Training`, and checks of it that one rank and two run alike."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from generation.trajectory import Trajectory
from hotbunk import Datum, Training, UserError
from sharding.ranks import RemoteError, exchange, rank
from sharding.send.source import gathered as whole
from tests.conftest import ROOT
from tests.support.launch import leave
from tests.support.learning_steps import as_step
from tests.support.rank_checks import Checks
from trainer.algorithms.aggregation import weights
from trainer.learning.learner import Learner
from trainer.learning.policy_loss import PolicyLoss, correction
from trainer.policy import FsdpPolicy
from trainer.types import LossFn, MicroBatch, UpdateStats

EXACT: dict[str, dict[str, Any]] = {
    "policy": {"dtype": "float32", "max_grad_norm": 1.0},
    "batch": {"tokens_per_micro_batch": 64},
    "run": {"device": "cpu", "step_deadline_s": 60},
}


def make(folder: Path, **settings: Any) -> Training:
    """Return a training in float32, in micro-batches of 64 tokens."""
    return Training(folder, **(EXACT | settings))


def random_data(count: int, seed: int = 0, shifted: bool = True) -> list[Datum]:
    """Draw data of 2 to 15 tokens, with numbers in all fields; weights of either sign and 0."""
    draw = random.Random(seed)
    data = []
    for _ in range(count):
        ids = [draw.randrange(5, 60) for _ in range(draw.randrange(3, 17))]
        size = len(ids) - 1
        data.append(
            Datum(
                inputs=ids[:-1],
                targets=ids[1:] if shifted else [draw.randrange(5, 60) for _ in range(size)],
                weights=[draw.choice([-0.5, 0.0, 1.0, 2.0]) for _ in range(size)],
                logprobs=[draw.uniform(-8, -1) for _ in range(size)],
                advantages=[draw.uniform(-1, 1) for _ in range(size)],
            )
        )
    return data


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logprobs(model: Any, datum: Datum) -> Tensor:
    """Return the log-probabilities [N] of the targets, from all logits in plain Transformers."""
    table = model(torch.tensor([datum.inputs])).logits[0].log_softmax(-1)
    return table[torch.arange(len(datum.inputs)), torch.tensor(datum.targets)]


def weights_of(training: Training) -> dict[str, Tensor]:
    """Return copies of all weights, whole, by name."""
    return {name: whole(p.detach()).clone() for name, p in training.policy.named_parameters()}


def gradients_of(training: Training) -> dict[str, Tensor]:
    """Return copies of the waiting gradients, whole, by name."""
    named = training.policy.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=tolerance, msg=name)


def random_answers() -> list[Trajectory]:
    """Draw four groups of four answers with rewards that differ."""
    draw = random.Random(7)
    trajectories = []
    for prompt in range(4):
        ids = [draw.randrange(5, 60) for _ in range(4)]
        for sample in range(4):
            trajectory = Trajectory(prompt, sample, ids, reward=float(sample % 3))
            answer = [draw.randrange(5, 60) for _ in range(draw.randrange(2, 8))]
            trajectory.extend(answer, [-4.0] * len(answer))
            trajectories.append(trajectory)
    return trajectories


class Recorded(FsdpPolicy):
    """A policy that records what the loop's update computes: each sequence as a datum."""

    data: dict[int, Datum]
    rate = 0.0

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        self.data = {}
        assert isinstance(loss_fn, PolicyLoss)
        config = loss_fn._config
        scores = self.score(batches, temperature)
        for batch, scored in zip(batches, scores, strict=True):
            table = weights(batch.loss_mask, config.aggregation, *loss_fn._counts, loss_fn._longest)
            table = table * correction(config, batch, scored.logprobs, scored.logprobs)[0]
            for line, row in enumerate(batch.rows):
                size = batch.lengths[line] - 1
                ids = batch.input_ids[line, : size + 1].tolist()
                advantages = batch.advantages[line, :size].tolist()
                factors = table[line, :size].tolist()
                self.data[row] = Datum(ids[:-1], ids[1:], factors, None, advantages)
        stats = super().update(batches, loss_fn, temperature, place)
        self.rate = stats.learning_rate
        return stats


def check_recipe(
    folder: Path, lora_rank: int | None, tolerance: float = 0.0, shared: bool = False
) -> None:
    """A step of `arithmetic.yaml`, given as data, ends in the loop's weights.

    Where common beginnings are `shared`, the loop may deal sequences to ranks in another way, so that micro-batches
    differ.
    """
    recipe = ROOT / "scripts/recipes/arithmetic.yaml"
    batch = EXACT["batch"] | {"share_prefixes": shared}
    with make(folder, recipe=str(recipe), lora_rank=lora_rank, batch=batch) as training:
        config = training.config
        policy = Recorded(config.model, config.policy, torch.device("cpu"), lora=config.lora)
        answers, groups = as_step(random_answers())
        metrics = Learner(config, policy, None, 0).learn(answers, groups, 1)
        assert metrics["updates"] == 1
        data = everyone(policy.data)
        assert len(data) == 16
        figures = training.forward_backward(data, "reinforce")
        training.optim_step(policy.rate)
        assert figures["tokens"] == metrics["train_tokens"]
        expected = {name: whole(p.detach()) for name, p in policy.named_parameters()}
        assert_equal(weights_of(training), expected, tolerance)


def everyone(data: dict[int, Datum]) -> list[Datum]:
    """Return all ranks' data, in order. Collective."""
    joined: dict[int, Datum] = {}
    for part in exchange([[row, *astuple(datum)] for row, datum in data.items()]):
        joined |= {row: Datum(*fields) for row, *fields in part}
    return [datum for _, datum in sorted(joined.items())]


def three_steps(folder: Path) -> dict[str, Tensor]:
    """Return the weights after three steps with losses by name and a function."""
    data = random_data(24)
    with make(folder) as training:
        for part, loss in ((data[:8], "ppo"), (data[8:16], squared), (data[16:], "cross_entropy")):
            training.forward_backward(part, loss)
            training.optim_step(1e-3)
        return weights_of(training)


def squared(data: Sequence[Datum], logprobs: list[Tensor]) -> Tensor:
    """A loss that joins all data, so that no share of them has its gradient."""
    return torch.cat(logprobs).mean().square()


def check_as_one_rank(folder: Path) -> None:
    expected = torch.load(folder / "one_rank.pt")
    assert_equal(three_steps(folder / "model"), expected, 1e-6)


def check_differences(folder: Path) -> None:
    """Ranks that differ are told how, all of them, and go on."""
    data = random_data(4)
    other = random_data(4, seed=rank())
    with make(folder / "model") as training:
        differ = "ranks differ in call 1: rank 0 logprobs, rank 1 optim_step; make the same calls"
        with pytest.raises(UserError, match=differ):
            if rank():
                training.optim_step(1e-3)
            else:
                training.logprobs(data)
        for call in (training.logprobs, training.forward_backward):
            with pytest.raises(UserError, match="ranks 0 and 1 have different data in call"):
                call(other)
        with pytest.raises(UserError, match="ranks 0 and 1 have different data in call 4, optim_step"):
            training.optim_step(1e-3 * (1 + rank()))

        def failing(given: Sequence[Datum], logprobs: list[Tensor]) -> Tensor:
            return squared(given, logprobs) / (1 - rank())

        with pytest.raises(UserError, match="the loss failing, or its gradient, is not finite"):
            training.forward_backward(data, failing)
        bad = [Datum([5], [6, 7])] if rank() else data
        with pytest.raises(UserError, match="datum 0: targets has 2 entries, but inputs has 1"):
            training.forward_backward(bad)
        training.forward_backward(data)
        assert training.optim_step(1e-3)["version"] == 1


def check_saving(folder: Path) -> None:
    """A save of one rank is loaded on two, and the other way round."""
    with make(folder / "model") as training:
        training.load(folder / "saved")
        assert_equal(weights_of(training), torch.load(folder / "saved.pt"))
        training.save(folder / "by_two")


def check_samples(folder: Path) -> None:
    """All ranks have the answers of both engines, with the policy's log-probabilities, after updates as well."""
    engine = {"max_model_len": 64, "kv_cache_gib": 0.0625}
    prompts = [[5, 6, 7], [8, 9], [10]]
    with make(folder / "model", engine=engine) as training:
        for version in range(2):
            groups = training.sample(prompts, 3, max_tokens=6)
            answers = [answer for group in groups for answer in group]
            assert [answer.prompt_ids for answer in answers] == [p for p in prompts for _ in range(3)]
            assert {answer.weight_version for answer in answers} == {version}
            tokens = [answer.token_ids for answer in answers]
            assert exchange(tokens) == [tokens, tokens] and len({*map(tuple, tokens)}) == 9
            scores = training.logprobs([Datum.answer(a.prompt_ids, a.token_ids) for a in answers])
            for answer, score in zip(answers, scores, strict=True):
                got = torch.tensor(answer.logprobs)
                torch.testing.assert_close(score[-len(got) :], got, rtol=0, atol=1e-5)
            training.forward_backward(random_data(6))
            training.optim_step(1e-3)
        with pytest.raises(UserError, match="sample_async works on one rank: call sample"):
            asyncio.run(training.sample_async(prompts))
        rows = [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}]
        groups = training.episodes(rows, 2, max_tokens=4)
        found = [[t.prompt_index, t.sample_index, *t.response_ids] for group in groups for t in group]
        assert exchange(found) == [found, found]
        assert [row[:2] for row in found] == [[p, s] for p in range(3) for s in range(2)]
        snapshot = training.snapshot()
        with pytest.raises(UserError, match="ranks 0 and 1 have different data in call"):
            training.sample(prompts, weights=snapshot if rank() else None)


def checks_of(folder: Path) -> Checks:
    model = folder / "model"
    return {
        "recipe": lambda: check_recipe(model, None),
        "recipe with common beginnings": lambda: check_recipe(model, None, 1e-6, shared=True),
        "recipe with adapters": lambda: check_recipe(model, 4),
        "as one rank": lambda: check_as_one_rank(folder),
        "differences": lambda: check_differences(folder),
        "samples": lambda: check_samples(folder),
        "saving": lambda: check_saving(folder),
    }


def wait_in_vain(folder: str) -> None:
    """Rank 1 makes no call, and rank 0 learns it after the deadline."""
    settings = EXACT | {"run": {"device": "cpu", "step_deadline_s": 5}}
    training = Training(folder, **settings)
    if rank() == 0:
        late = r"lost contact with another rank, which did not come within 5 s in call 1, logprobs"
        with pytest.raises(RemoteError, match=late):
            training.logprobs(random_data(1))
        Path(folder, "told").touch()
    while not Path(folder, "told").exists():
        time.sleep(0.1)
    leave()
