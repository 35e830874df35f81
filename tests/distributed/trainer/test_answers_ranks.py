"""Each of one, two or four real ranks receives the tokens it trains on, and 32 bytes of every other answer."""

import json
import math
from typing import Any

import pytest

from tests.support.answers_checks import SHARE, exchange_a_step, trajectories
from tests.support.launch import run_ranks

SUMMED = 3 * 8 * (5 * 2048 + 512) + 2 * 8
"""Bytes of the histograms from which three figures of all tokens come, and of two counts."""


@pytest.fixture(scope="module", params=[1, 2, 4])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Exchange a step on some ranks, and return each rank's report."""
    results = tmp_path_factory.mktemp("answers") / "results.json"
    run_ranks(exchange_a_step, request.param, timeout=240, arguments=[str(results)])
    by_rank: list[dict[str, Any]] = json.loads(results.read_text())
    assert len(by_rank) == request.param
    return by_rank


def test_a_rank_receives_its_share_and_32_bytes_an_answer(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        share = 9 * sum(len(ids) for _, _, ids, _ in report["trained"])
        assert report["received"] <= share + 32 * SHARE * len(reports)
        assert (report["received"] == 0) == (len(reports) == 1)
    assert {report["summed"] for report in reports} <= {
        0,
        SUMMED,
    }  # independent of the number of ranks, if there are several


def test_every_sequence_is_trained_on_once_as_it_was_sampled(reports: list[dict[str, Any]]) -> None:
    sampled = {
        (t.prompt_index, t.sample_index): t
        for number in range(len(reports))
        for t in trajectories(number)
    }
    trained = [row for report in reports for row in report["trained"]]
    assert sorted((prompt, sample) for prompt, sample, *_ in trained) == sorted(sampled)
    for prompt, sample, ids, logprobs in trained:
        trajectory = sampled[prompt, sample]
        assert ids == trajectory.prompt_ids + trajectory.response_ids
        assert logprobs == pytest.approx(math.fsum(trajectory.logprobs), rel=1e-5)


def test_figures_are_those_of_all_tokens_and_the_same_everywhere(reports: list[dict[str, Any]]) -> None:
    sampled = [t for number in range(len(reports)) for t in trajectories(number)]
    figures = reports[0]["figures"]
    assert all(report["figures"] == figures for report in reports)
    assert figures["rollout_tokens"] == sum(len(t.response_ids) for t in sampled)
    assert figures["reward/match"] == math.fsum(t.reward_parts["match"] for t in sampled) / len(sampled)
    entropies = sorted(value for report in reports for value in report["entropies"])
    place = 0.8 * (len(entropies) - 1)
    threshold = (entropies[math.floor(place)], entropies[math.ceil(place)])
    assert threshold[0] == threshold[1]  # there are only eleven states, so nothing is interpolated
    assert sum(report["decisive"] for report in reports) == sum(
        value >= threshold[0] for value in entropies
    )
