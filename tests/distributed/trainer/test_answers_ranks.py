"""One, two and four real ranks: each receives the tokens it trains on, and of all others 32 bytes an answer."""

import json
import math
from typing import Any

import pytest

from tests.support.answers_checks import SHARE, exchange_a_step, trajectories
from tests.support.launch import run_ranks

SUMMED = 3 * 8 * (5 * 2048 + 512) + 2 * 8
"""Bytes of the histograms that find three numbers among all tokens', and of two counts."""


@pytest.fixture(scope="module", params=[1, 2, 4])
def everyones(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = tmp_path_factory.mktemp("answers") / "results.json"
    run_ranks(exchange_a_step, request.param, timeout=240, arguments=[str(results)])
    found: list[dict[str, Any]] = json.loads(results.read_text())
    assert len(found) == request.param
    return found


def test_a_rank_receives_its_share_and_32_bytes_an_answer(everyones: list[dict[str, Any]]) -> None:
    for own in everyones:
        share = 9 * sum(len(ids) for _, _, ids, _ in own["trained"])
        assert own["received"] <= share + 32 * SHARE * len(everyones)
        assert (own["received"] == 0) == (len(everyones) == 1)
    assert {own["summed"] for own in everyones} <= {0, SUMMED}  # whatever the number of ranks, if there are several


def test_every_sequence_is_trained_on_once_as_it_was_sampled(everyones: list[dict[str, Any]]) -> None:
    sampled = {(t.prompt_index, t.sample_index): t for number in range(len(everyones)) for t in trajectories(number)}
    trained = [row for own in everyones for row in own["trained"]]
    assert sorted((prompt, sample) for prompt, sample, *_ in trained) == sorted(sampled)
    for prompt, sample, ids, logprobs in trained:
        trajectory = sampled[prompt, sample]
        assert ids == trajectory.prompt_ids + trajectory.response_ids
        assert logprobs == pytest.approx(math.fsum(trajectory.logprobs), rel=1e-5)


def test_figures_are_those_of_all_tokens_and_the_same_everywhere(everyones: list[dict[str, Any]]) -> None:
    sampled = [t for number in range(len(everyones)) for t in trajectories(number)]
    figures = everyones[0]["figures"]
    assert all(own["figures"] == figures for own in everyones)
    assert figures["rollout_tokens"] == sum(len(t.response_ids) for t in sampled)
    assert figures["reward/match"] == math.fsum(t.reward_parts["match"] for t in sampled) / len(sampled)
    entropies = sorted(value for own in everyones for value in own["entropies"])
    place = 0.8 * (len(entropies) - 1)
    threshold = (entropies[math.floor(place)], entropies[math.ceil(place)])
    assert threshold[0] == threshold[1]  # of eleven states, so there is nothing to interpolate
    assert sum(own["decisive"] for own in everyones) == sum(value >= threshold[0] for value in entropies)
