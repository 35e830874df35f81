"""Answers of which earlier versions of the policy sampled the beginning: corrected or masked, and measured apart."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from generation.trajectory import Trajectory
from sharding.ranks import rank
from tests.support.learning_steps import TablePolicy, on_ranks, random_step
from tests.support.recipes import make_config
from trainer.learning.answers import exchange_samples, gather_answers
from trainer.learning.batching import assign_to_ranks
from trainer.learning.groups import make_groups, to_sample
from trainer.learning.learner import Learner

NOW = 5
ADVANTAGES = {0: -1.0, 1: 1.0}  # of the samples of a group, as their rewards are 0 and 1


class Aged(TablePolicy):
    """A policy of version 5 with a known table."""

    version = NOW


def step() -> list[Trajectory]:
    """Return two groups of two: all tokens of this version; the first three of version 3; three versions; only old
    ones.
    """
    versions = [[(NOW, 0)], [(3, 0), (NOW, 3)], [(2, 0), (4, 2), (NOW, 6)], [(1, 0), (4, 5)]]
    table = torch.log_softmax(Aged().table, dim=1)
    trajectories = []
    for index, spans in enumerate(versions):
        ids = [(3 * index + 2 * token) % 10 + 1 for token in range(7 + index)]
        before = [4, *ids[:-1]]
        trained = [float(table[a, b]) for a, b in zip(before, ids, strict=True)]
        # The engine's present version computes what the trainer does, within a bit; earlier ones were elsewhere.
        far = [
            1e-5 * (-1) ** t
            if t >= spans[-1][1] and spans[-1][0] == NOW
            else 0.3 * math.sin(t + index) + 0.4
            for t in range(len(ids))
        ]
        logprobs = [logprob - away for logprob, away in zip(trained, far, strict=True)]
        mask = [1] * len(ids)
        if index == 2:
            mask[4], logprobs[4] = 0, 0.0  # what a tool said
        place = index // 2, index % 2
        trajectories.append(
            Trajectory(*place, [4], ids, mask, logprobs, versions=spans, reward=float(index % 2))
        )
    return trajectories


def learned(
    trajectories: list[Trajectory], ranks: int = 1, **sections: dict[str, Any]
) -> dict[str, float]:
    """Return the figures of a step, on whose first update the loss and the gaps depend."""
    base: dict[str, Any] = {
        "algorithm": {"group_size": 2, "aggregation": "token_mean"},
        "batch": {"prompts_per_step": 2},
        "rollout": {"slice_tokens": 3, "ahead": 1},
    }
    config = make_config(base, **sections)

    def one() -> dict[str, float]:
        rank_trajectories = [
            t
            for t in trajectories
            if (t.prompt_index + t.sample_index) % ranks == (rank() if ranks > 1 else 0)
        ]
        answers = gather_answers(rank_trajectories, version=NOW)
        waiting = [replace(step()[0], prompt_index=9)]
        learner = Learner(
            config, Aged(), None, pad_id=0, untrained=lambda: gather_answers(waiting, version=NOW)
        )  # type: ignore[arg-type]
        return learner.learn(answers, make_groups(answers), 1)

    return on_ranks(ranks, one)[0] if ranks > 1 else one()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("old_tokens", ["correct", "mask"])
def test_the_loss_equals_a_loop_over_tokens(old_tokens: str, ranks: int) -> None:
    table, cap = torch.log_softmax(Aged().table, dim=1), 1.3
    total, count, old_count = 0.0, 0, 0
    gaps: list[float] = []
    ratios: dict[int, list[float]] = {}
    for t in step():
        new_from = next((start for version, start in t.versions if version == NOW), len(t.response_ids))
        for place, (before, token) in enumerate(
            zip([4, *t.response_ids[:-1]], t.response_ids, strict=True)
        ):
            old = place < new_from
            if not t.loss_mask[place] or (old and old_tokens == "mask"):
                continue
            distance = float(table[before, token]) - t.logprobs[place]
            total -= min(math.exp(distance), cap) * ADVANTAGES[t.sample_index]
            count, old_count = count + 1, old_count + old
            age = NOW - max(version for version, start in t.versions if start <= place)
            (ratios.setdefault(age, []) if old else gaps).append(abs(distance))
    figures = learned(
        step(),
        ranks,
        rollout={"old_tokens": old_tokens},
        algorithm={"tis_cap": cap, "normalize_std": True},
    )
    assert figures["train_tokens"] == count
    assert figures["loss"] == pytest.approx(total / count, rel=1e-5)
    assert figures["gap/max"] == pytest.approx(max(gaps), rel=0.05) and figures["gap/max"] < 2e-5
    assert figures["gap/mean"] == pytest.approx(sum(gaps) / len(gaps), rel=0.05)
    if old_tokens == "correct":
        assert old_count > 10
        all_ages = [ratio for age_ratios in ratios.values() for ratio in age_ratios]
        expected = {"stale/log_ratio": sum(all_ages) / len(all_ages)}
        expected |= {
            f"stale/log_ratio_{age}": sum(age_ratios) / len(age_ratios)
            for age, age_ratios in ratios.items()
        }
        assert {key: figures[key] for key in figures if key.startswith("stale/")} == pytest.approx(
            expected, rel=1e-5
        )
        assert sorted(ratios) == [1, 2, 3, 4]
    else:
        assert old_count == 0 and not any(key.startswith("stale/") for key in figures)


def test_a_fault_of_the_sync_is_in_the_gap_whatever_the_age_of_the_other_tokens() -> None:
    trajectories = step()
    fresh = trajectories[1]
    fresh.logprobs[5] -= 0.7  # a token of the present version, sampled by a wrong weight
    figures = learned(trajectories)
    assert figures["gap/max"] == pytest.approx(0.7, abs=1e-3)
    assert figures["stale/log_ratio"] == pytest.approx(learned(step())["stale/log_ratio"], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gap_is_measured_on_waiting_answers_if_none_is_current(ranks: int) -> None:
    trajectories = step()
    for t in trajectories:
        t.versions, t.weight_version = [(3, 0)], 3
    figures = learned(trajectories, ranks)
    assert 0 < figures["gap/max"] < 2e-5 and figures["stale/log_ratio"] > 0.1
    masked = learned(trajectories, ranks, rollout={"old_tokens": "mask"})
    assert masked["no_signal_steps"] == 1 and masked["gap/max"] == figures["gap/max"]


@pytest.mark.parametrize("mask_old", [False, True])
def test_every_rank_has_counts_of_old_tokens_and_trainers_have_their_ages(mask_old: bool) -> None:
    trajectories = random_step(6, 3, seed=4)
    for number, t in enumerate(trajectories):
        newer = range(1, len(t.response_ids), 2)
        t.versions = [(0, 0), *((1 + start, start) for start in newer)]
        t.weight_version = t.versions[-1][0] if number % 3 else 0
        if number % 5 == 0:
            # So that the first token, which nothing comes before, is one that was sampled
            t.prompt_ids = []
    for version in (2, 4, 99):

        def one(version: int = version) -> bool:
            rank_trajectories = [t for t in trajectories if t.prompt_index % 2 == rank()]
            answers = gather_answers(rank_trajectories, version=version)
            order = sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))
            samples = [to_sample(t, version=version, mask_old=mask_old) for t in order]
            for answer, sample in zip(answers, samples, strict=True):
                assert answer.trainable(mask_old=mask_old) == sample.trainable
            shares = [assign_to_ranks([answer.length for answer in answers], 2)]
            [mine] = exchange_samples(
                [answers], shares, lambda t: to_sample(t, version=version, mask_old=mask_old)
            )
            for sample, position in zip(mine, shares[0][rank()], strict=True):
                assert (
                    sample.ages == samples[position].ages
                    and sample.loss_mask == samples[position].loss_mask
                )
            for sample, t in zip(samples, order, strict=True):
                newest = [
                    max(v for v, start in t.versions if start <= i) for i in range(len(t.response_ids))
                ]
                ages = [0] * len(t.prompt_ids) + [max(0, version - newest) for newest in newest]
                assert sample.ages == (ages if any(ages) else [])
            return any(sample.ages for sample in samples)

        assert all(on_ranks(2, one))
