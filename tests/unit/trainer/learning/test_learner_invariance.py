"""However a step is cut into micro-batches and dealt out to ranks, the learner learns the same.

The whole learner on threads in place of ranks, with a policy whose gradient shows in its weights: every loss with every
aggregation, and with each way of assigning credit, correcting and shaping.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from generation.trajectory import Trajectory
from tests.support.learning_steps import TableCritic, TablePolicy, as_step, on_ranks, random_step
from tests.support.recipes import make_config
from trainer.learning import Learner, Metrics

LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual clip": {"dual_clip": 2.0},
    "gspo": {"ratio_level": "geometric"},
    "whole answers": {"ratio_level": "sequence"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "reinforce": {"loss": "reinforce"},
}
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
IN_REWARD = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
CHOICES: dict[str, dict[str, Any]] = {
    "group": {"kl_coef": 0.1, "entropy_coef": 0.01, "num_iterations": 2},
    "turns": {"credit": "turns", "gamma": 0.9},
    "leave one out": {"advantage": "leave_one_out", **IN_REWARD},
    "max_rl": {"advantage": "max_rl", "length_strength": 0.5, "drop_zero_variance": True},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_clamp": 0.2, **IN_REWARD},
    "reinforce_pp turns": {"advantage": "reinforce_pp", "credit": "turns", "gamma": 0.9},
    "gae": {"advantage": "gae", "gae_lambda": 0.9, "num_iterations": 2, **IN_REWARD},
    "shared critic": {
        "advantage": "gae",
        "gamma": 0.9,
        "value_coef": 0.3,
        "value_clip": 0.1,
        "credit": "turns",
    },
    "distill": {"advantage": "distill"},
    "baseline": {"advantage": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_estimator": "unbiased_k3"},
    "decisive": {"high_entropy_share": 0.4},
    "bands": {
        "keep_band": [0.8, 1.25],
        "keep_level": "geometric",
        "tis_level": "sequence",
        "tis_cap": 1.1,
    },
    "stale": {"stale_threshold": 0.05, "keep_band": [0.9, 1.2], "tis_cap": None},
    "long answers": {"overlong_filter": True, "overlong_margin": 0.5},
    "several rewards": {"combine_rewards": "normalize_then_sum", "overlong_margin": 0.5},
}


def combinations(choice: str) -> Iterator[tuple[str, str]]:
    """List every loss, with every aggregation for the first of the choices and with one in turn for the others."""
    if choice == "group":
        yield from itertools.product(LOSSES, AGGREGATIONS)
    else:
        start = list(CHOICES).index(choice)
        yield from zip(
            LOSSES, itertools.islice(itertools.cycle(AGGREGATIONS), start, None), strict=False
        )


def learned(
    choice: str,
    algorithm: dict[str, Any],
    updates: int,
    seed: int,
    ranks: int,
    budget: int,
    ways: int = 1,
    change: Callable[[list[Trajectory]], list[Trajectory]] = list,
    shared: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the weights of policy and critic after the step, and the step's figures, on which all ranks agree."""
    config = make_config(
        algorithm=algorithm,
        batch={
            "updates_per_step": updates,
            "tokens_per_micro_batch": budget,
            "share_prefixes": shared,
            "shared_tokens_min": 1,
        },
        sampling={"max_tokens": 6, "temperature": 0.8},
        policy={"sequence_parallel": ways},
    )

    def rank() -> tuple[Tensor, Metrics]:
        policy = TablePolicy(values=choice == "shared critic")
        reference = TablePolicy(seed=1) if config.algorithm.kl_coef or choice == "distill" else None
        critic = TableCritic() if choice == "gae" else None
        learner = Learner(config, policy, reference, 0, {"a": 1.0, "b": 0.5}, critic)  # type: ignore[arg-type]
        metrics = learner.learn(*as_step(change(random_step(4, 3, seed))), step=1)
        return torch.stack([policy.table, critic.table if critic else policy.table]), metrics

    (table, metrics), *other_ranks = on_ranks(ranks, rank)
    for other_table, other_metrics in other_ranks:
        assert torch.equal(other_table, table) and other_metrics == metrics
    return table, metrics


@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=1, deadline=None, database=None, phases=[Phase.generate])
@given(seed=st.integers(0, 10**6), updates=st.integers(1, 3), budget=st.integers(10, 60))
def test_the_learner_learns_the_same_however_a_step_is_split(
    choice: str, seed: int, updates: int, budget: int
) -> None:
    for loss, aggregation in combinations(choice):
        algorithm = {**CHOICES[choice], **LOSSES[loss], "aggregation": aggregation}
        table, metrics = learned(choice, algorithm, updates, seed, ranks=1, budget=10**6)
        assert metrics["no_signal_steps"] == 0 and not torch.equal(table[0], TablePolicy().table), (
            loss,
            aggregation,
        )
        for ranks, ways in ((1, 1), (2, 1), (4, 1), (4, 2)):  # the last in pairs that share sequences
            other, figures = learned(choice, algorithm, updates, seed, ranks, budget, ways)
            where = (loss, aggregation, ranks, ways)
            torch.testing.assert_close(other, table, rtol=1e-5, atol=1e-7, msg=str(where))
            assert figures == pytest.approx(metrics, rel=1e-4, abs=1e-6), where


@pytest.mark.parametrize("choice", ["group", "shared critic", "stale", "decisive"])
def test_the_learner_learns_the_same_if_answers_share_beginnings(choice: str) -> None:
    """Group are dealt out whole or cut; every figure is the same, and what is shared is counted."""

    def with_prompts(step: list[Trajectory]) -> list[Trajectory]:
        for trajectory in step:
            trajectory.prompt_ids = [1 + trajectory.prompt_index] * 12
        return step

    table, metrics = learned(
        choice, CHOICES[choice], updates=2, seed=3, ranks=1, budget=60, change=with_prompts
    )
    for ranks, ways in ((1, 1), (2, 1), (3, 1), (4, 2)):
        where = {"ranks": ranks, "ways": ways, "change": with_prompts, "shared": True}
        other, figures = learned(choice, CHOICES[choice], updates=2, seed=3, budget=60, **where)
        torch.testing.assert_close(other, table, rtol=1e-6, atol=1e-7)
        share = {name: value for name, value in figures.items() if name.startswith("share/")}
        assert {name: value for name, value in figures.items() if name not in share} == pytest.approx(
            metrics, rel=1e-5, abs=1e-6
        )
        assert (
            0.2 < share["share/tokens"] < 0.9
            and share["share/nodes"] > 4
            and share["share/lost_to_routes"] == 0
        )
        assert share["share/split_groups"] <= 4


@pytest.mark.parametrize("choice", CHOICES)
def test_answers_whose_reward_failed_change_no_advantage_count_or_loss(choice: str) -> None:
    """One of a group, two of a group, and a whole group count as if they did not exist, in advantages, counts
    and loss.
    """
    failed = {(0, 1), (1, 0), (1, 2), (3, 0), (3, 1), (3, 2)}

    def without(step: list[Trajectory]) -> list[Trajectory]:
        return [t for t in step if (t.prompt_index, t.sample_index) not in failed]

    def marked(step: list[Trajectory]) -> list[Trajectory]:
        for trajectory in step:
            if (trajectory.prompt_index, trajectory.sample_index) in failed:
                trajectory.reward, trajectory.reward_parts = 0.0, {}
                trajectory.reward_error, trajectory.error = "a took longer", "reward: a took longer"
        return step

    step: dict[str, Any] = {"updates": 2, "seed": 11, "budget": 40}
    table, metrics = learned(choice, CHOICES[choice], **step, ranks=1, change=without)
    assert not torch.equal(table[0], TablePolicy().table)
    for ranks in (1, 2):
        other, figures = learned(choice, CHOICES[choice], **step, ranks=ranks, change=marked)
        torch.testing.assert_close(other, table, rtol=1e-6, atol=1e-7)
        assert figures == pytest.approx(metrics, rel=1e-5, abs=1e-6)
