"""Steps of a mixture of experts, by the learner on one rank: the routes that updates take, and their metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from generation.trajectory import Trajectory
from tests.support import policy_checks as checks
from tests.support.learning_steps import as_step
from tests.support.recipes import make_config
from trainer.config.schema import TrainConfig
from trainer.learning.learner import Learner
from trainer.policy import FsdpPolicy
from trainer.types import LossFn, MicroBatch, UpdateStats

LAYERS, EXPERTS, TOP_K = 2, 5, 2


class Watched(FsdpPolicy):
    """Records the routes of every update's micro-batches, and the first log-ratios."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config.model, config.policy, checks.CPU)
        self.seen: list[list[Tensor | None]] = []
        self.ratios: list[float] = []

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        self.seen.append([batch.routes for batch in batches])

        def loss(batch: MicroBatch, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
            if batch.old_logprobs is not None:
                self.ratios.append((outputs.logprobs - batch.old_logprobs).abs().max().item())
            return loss_fn(batch, outputs)

        return super().update(batches, loss, temperature, place)


def mixture_config(models: Path, routes: str, **sections: dict[str, Any]) -> TrainConfig:
    """Return a configuration of the mixture with this kind of routes."""
    path = str(checks.model_folder(models, "qwen3_moe", False))
    base: dict[str, dict[str, Any]] = {
        "model": {"path": path, "routes": routes},
        "policy": {"dtype": "float32", "lr": 1e-3},
        "batch": {"tokens_per_micro_batch": 40},
    }
    return make_config(base, **sections)


def answers(routed: bool, rewards: tuple[float, ...] = (1.0, 0.0, 0.5, 0.0)) -> list[Trajectory]:
    """Two prompts with two samples each, which have random routes if `routed`."""
    generator, trajectories = torch.Generator().manual_seed(4), []
    for number, reward in enumerate(rewards):
        ids = torch.randint(checks.VOCABULARY, (7 + number + 9,), generator=generator).tolist()
        prompt, response = ids[:7], ids[7:]
        trajectory = Trajectory(
            number // 2, number % 2, prompt, response, [1] * len(response), [-5.0] * len(response)
        )
        trajectory.reward = reward
        if routed:
            scores = torch.rand(len(ids) - 1, LAYERS, EXPERTS, generator=generator)
            trajectory.routes = scores.topk(TOP_K).indices.to(torch.uint8).numpy()
        trajectories.append(trajectory)
    return trajectories


def learn(
    config: TrainConfig, trajectories: list[Trajectory], steps: int = 1
) -> Iterator[tuple[Watched, dict[str, float]]]:
    """Run `steps` steps on the trajectories, and yield the policy and the metrics after each."""
    policy = Watched(config)
    learner = Learner(config, policy, None, pad_id=0)
    for step in range(1, steps + 1):
        yield policy, learner.learn(*as_step(trajectories), step)


def test_every_update_of_a_step_replays_the_routes_of_the_first_pass(
    one_rank: None, models: Path
) -> None:
    """The first update's log-probabilities therefore equal those before it, bit for bit."""
    config = mixture_config(models, "recorded", algorithm={"num_iterations": 3})
    [(policy, metrics)] = learn(config, answers(routed=False))
    assert len(policy.seen) == 3 and all(routes is not None for routes in policy.seen[0])
    for update in policy.seen[1:]:
        assert all(one is other for one, other in zip(update, policy.seen[0], strict=True))
    assert policy.ratios[: len(policy.seen[0])] == [0.0] * len(policy.seen[0]) and max(policy.ratios) > 0
    assert metrics["moe/load_max_over_mean"] >= 1


def test_updates_replay_the_engines_routes_and_the_router_learns(one_rank: None, models: Path) -> None:
    config, step = mixture_config(models, "engine"), answers(routed=True)
    gate = "model.layers.0.mlp.gate.weight"
    before = (
        dict(FsdpPolicy(config.model, config.policy, checks.CPU).named_parameters())[gate]
        .full_tensor()
        .clone()
    )
    [(policy, metrics)] = learn(config, step)
    [batches] = policy.seen
    taken = torch.cat([routes for routes in batches if routes is not None]).flatten(1).tolist()
    sampled = [
        row for t in step if t.routes is not None for row in t.routes.reshape(len(t.routes), -1).tolist()
    ]
    assert sorted(taken) == sorted(sampled)
    assert 0.5 < metrics["moe/routes_differ"] <= 1  # the given routes are random
    assert not torch.equal(dict(policy.named_parameters())[gate].full_tensor(), before)


def test_a_step_without_signal_measures_the_gap_with_the_engines_routes(
    one_rank: None, models: Path
) -> None:
    config = mixture_config(models, "engine")
    [(policy, metrics)] = learn(config, answers(routed=True, rewards=(1.0,) * 4))
    assert policy.seen == [] and metrics["no_signal_steps"] == 1.0
    assert metrics["moe/routes_differ"] > 0.5 and metrics["gap/mean"] > 0


def test_a_missing_row_of_routes_is_an_error_that_names_the_sample(one_rank: None, models: Path) -> None:
    step = answers(routed=True)
    assert step[2].routes is not None
    step[2].routes = step[2].routes[:-1]
    with pytest.raises(
        RuntimeError, match="prompt 1 sample 0: the engine gave 16 rows of routes for 17 tokens"
    ):
        list(learn(mixture_config(models, "engine"), step))


def test_a_balance_loss_evens_out_the_load(one_rank: None, models: Path) -> None:
    """The load evens out over fifty updates on answers of equal reward, where nothing else moves the router."""
    equal_answers, falls = answers(routed=False, rewards=(0.0,) * 4), {}
    for coef in (0.0, 0.1):
        config = mixture_config(
            models, "recorded", algorithm={"balance_coef": coef}, policy={"lr": 3e-3}
        )
        steps = [metrics for _, metrics in learn(config, equal_answers, 50 if coef else 2)]
        falls[coef] = steps[0]["moe/load_max_over_mean"], steps[-1]["moe/load_max_over_mean"]
        assert ("moe/balance" in steps[0]) == (coef > 0) and steps[0]["updates"] == float(coef > 0)
    assert falls[0.0][0] == falls[0.0][1] == falls[0.1][0]
    assert falls[0.1][1] < 0.8 * falls[0.1][0]


def test_the_loads_of_routers_without_replay_are_counted_too(one_rank: None, models: Path) -> None:
    [(policy, metrics)] = learn(mixture_config(models, "own"), answers(routed=False))
    assert policy.seen and all(routes is None for routes in policy.seen[0])
    assert metrics["moe/routes_differ"] == 0.0 and metrics["moe/load_max_over_mean"] > 1
