"""Advantages of every token of a step, against loops over answers and tokens."""

import math
from typing import Any

import pytest
import torch

from generation.trajectory import Trajectory
from tests.unit.learning_steps import make_config, random_step
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.learning.credit import assign_credit, has_signal
from trainer.learning.groups import informative, longest_answer, make_groups
from trainer.learning.minibatches import MiniBatch, prepare, split

CPU = torch.device("cpu")
IN_REWARD = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
WEIGHTS = {"a": 1.0, "b": 0.5}


def credited(step: list[Trajectory], config: TrainConfig, parts: int = 2) -> list[tuple[Trajectory, list[float], dict]]:
    """Each answer with the advantages of its response's tokens, and what else is known of them."""
    generator = torch.Generator().manual_seed(7)
    minibatches = [prepare(groups, config, 0, CPU) for groups in split(make_groups(step), parts)]
    for minibatch in minibatches:
        for batch in minibatch.batches:
            batch.old_logprobs, batch.ref_logprobs, batch.old_values = (
                torch.randn(batch.loss_mask.shape, generator=generator) for _ in range(3)
            )
    assign_credit(minibatches, config, WEIGHTS)
    return [answer for minibatch in minibatches for answer in _answers(minibatch)]


def _answers(minibatch: MiniBatch) -> list[tuple[Trajectory, list[float], dict]]:
    answers = {}
    everyone = [t for group in minibatch.groups for t in group]
    for batch in minibatch.batches:
        for row, place in enumerate(batch.rows):
            trajectory = everyone[place]
            first = len(trajectory.prompt_ids) - 1
            part = slice(first, first + len(trajectory.response_ids))
            names = ("old_logprobs", "ref_logprobs", "old_values", "returns", "loss_mask")
            known = {n: x[row, part].tolist() for n in names if (x := getattr(batch, n)) is not None}
            answers[place] = (trajectory, batch.advantages[row, part].tolist(), known)
    return [answers[place] for place in range(len(everyone))]


def groups_of(answers: list[tuple[Trajectory, list[float], dict]]) -> list[list[int]]:
    prompts = [t.prompt_index for t, _, _ in answers]
    return [[i for i, p in enumerate(prompts) if p == prompt] for prompt in sorted(set(prompts))]


def turn_numbers(mask: list[float]) -> list[int]:
    """For each token the number of its turn, or -1."""
    numbers, turn = [], -1
    for position, trained in enumerate(mask):
        turn += bool(trained) and (position == 0 or not mask[position - 1])
        numbers.append(turn if trained else -1)
    return numbers


def relative(values: list[float], std: bool) -> list[float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return [0.0 if max(values) == min(values) else (v - mean) / ((spread + 1e-6) if std else 1.0) for v in values]


@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [
        ({}, lambda r: relative(r, True)),
        ({"normalize_std": False}, lambda r: relative(r, False)),
        (
            {"advantage": "leave_one_out"},
            lambda r: [0.0 if len(r) == 1 else x - (sum(r) - x) / (len(r) - 1) for x in r],
        ),
        ({"advantage": "max_rl", "kl_coef": 0.0}, lambda r: [x / (sum(r) / len(r)) - 1 if sum(r) else 0.0 for x in r]),
    ],
)
@pytest.mark.parametrize("kl", [False, True])
def test_answers_are_compared_within_their_group(algorithm: dict[str, Any], formula: Any, kl: bool) -> None:
    algorithm = (IN_REWARD if kl else {}) | algorithm
    kl = kl and algorithm["kl_coef"] > 0
    answers = credited(random_step(4, 4, seed=1), make_config(algorithm=algorithm))
    for members in groups_of(answers):
        rewards = []
        for trajectory, _, known in (answers[i] for i in members):
            drift = zip(known["loss_mask"], known["old_logprobs"], known["ref_logprobs"], strict=True)
            rewards.append(trajectory.reward - kl * 0.1 * sum(m * (old - ref) for m, old, ref in drift))
        for i, expected in zip(members, formula(rewards), strict=True):
            got = answers[i][1]
            assert got == pytest.approx([expected] * len(got), abs=2e-5)


@pytest.mark.parametrize("std", [True, False])
def test_turns_are_compared_with_the_same_turn_of_others(std: bool) -> None:
    """A turn's own reward and the discounted ones after it; what turns were not given is the last one's."""
    algorithm = {"credit": "turns", "discount": 0.9, "normalize_std": std}
    answers = credited(random_step(4, 4, seed=2), make_config(algorithm=algorithm))
    for members in groups_of(answers):
        returns = {}
        for i in members:
            trajectory, _, known = answers[i]
            turns = max(turn_numbers(known["loss_mask"])) + 1
            rewards = (trajectory.turn_rewards or [0.0] * turns)[:turns]
            rewards[-1] += trajectory.reward - sum(trajectory.turn_rewards)
            for turn in range(turns):
                returns[i, turn] = sum(0.9**k * reward for k, reward in enumerate(rewards[turn:]))
        for i in members:
            for number, got in zip(turn_numbers(answers[i][2]["loss_mask"]), answers[i][1], strict=True):
                peers = [key for key in returns if key[1] == number]
                expected = 0.0
                if number >= 0:
                    expected = relative([returns[key] for key in peers], std)[peers.index((i, number))]
                assert got == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("credit", ["outcome", "turns"])
@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_tokens_get_what_comes_after_them_relative_to_the_step(advantage: str, credit: str) -> None:
    """Rewards where turns or the episode end, less KL; summed up backwards, by a critic or not; then whitened."""
    algorithm = {"advantage": advantage, "credit": credit, "discount": 0.9, "trace": 0.8, **IN_REWARD}
    answers = credited(random_step(4, 4, seed=3), make_config(algorithm=algorithm))
    raw: list[list[float]] = []
    for trajectory, _, known in answers:
        numbers = turn_numbers(known["loss_mask"])
        turns, row = max(numbers) + 1, [0.0] * len(numbers)
        given = [0.0] * turns if credit == "outcome" else (trajectory.turn_rewards or [0.0] * turns)[:turns]
        given[-1] += trajectory.reward - sum(given)
        upcoming = value_after = 0.0
        for t in reversed(range(len(numbers))):
            if numbers[t] < 0:
                continue
            ends = t + 1 == len(numbers) or numbers[t + 1] < 0
            reward = given[numbers[t]] * ends - 0.1 * (known["old_logprobs"][t] - known["ref_logprobs"][t])
            if advantage == "gae":
                value = known["old_values"][t]
                upcoming = reward + 0.9 * value_after - value + 0.9 * 0.8 * upcoming
                assert known["returns"][t] == pytest.approx(upcoming + value, abs=1e-5)
                value_after = value
            else:
                upcoming = reward + 0.9 * upcoming
            row[t] = upcoming
        raw.append(row)
    masks = [known["loss_mask"] for _, _, known in answers]
    counted = [x for row, mask in zip(raw, masks, strict=True) for x, m in zip(row, mask, strict=True) if m]
    white = iter(relative(counted, True))
    for (_, got, _), mask in zip(answers, masks, strict=True):
        assert got == pytest.approx([next(white) if m else 0.0 for m in mask], abs=2e-5)


def test_reinforce_pp_baseline_is_relative_to_the_group_and_then_to_the_step() -> None:
    answers = credited(random_step(4, 4, seed=4), make_config(algorithm={"advantage": "reinforce_pp_baseline"}))
    centred = {}
    for members in groups_of(answers):
        values = relative([answers[i][0].reward for i in members], False)
        centred |= dict(zip(members, values, strict=True))
    tokens = [(i, m) for i, (_, _, known) in enumerate(answers) for m in known["loss_mask"]]
    white = iter(relative([centred[i] for i, m in tokens if m], True))
    expected = [next(white) if m else 0.0 for i, m in tokens]
    assert [x for _, got, _ in answers for x in got] == pytest.approx(expected, abs=2e-5)


def test_each_reward_is_made_relative_by_itself_before_they_are_added() -> None:
    """Both functions', what the episode itself gave, and the penalty of long answers."""
    config = make_config(
        algorithm={"combine_rewards": "normalize_then_sum", "overlong_margin": 0.5}, sampling={"max_tokens": 8}
    )
    answers = credited(random_step(4, 4, seed=5), config)
    for members in groups_of(answers):
        group = [answers[i][0] for i in members]
        sampled = [sum(t.loss_mask) for t in group]
        own = [t.reward - t.reward_parts["a"] - 0.5 * t.reward_parts["b"] for t in group]
        total = zip(
            relative([t.reward_parts["a"] for t in group], True),
            [0.5 * x for x in relative([t.reward_parts["b"] for t in group], True)],
            relative([round(x, 9) for x in own], True),
            relative([-min(max(n - 4, 0) / 4, 1.0) for n in sampled], True),
            strict=True,
        )
        for i, parts in zip(members, total, strict=True):
            assert answers[i][1][0] == pytest.approx(sum(parts), abs=1e-4)


def test_length_shapes_rewards_but_not_which_groups_have_a_signal() -> None:
    def answer(sample: int, tokens: int) -> Trajectory:
        return Trajectory(0, sample, [1], [2] * tokens, [1] * tokens, [-1.0] * tokens, reward=1.0)

    step = [answer(0, 2), answer(1, 6)]
    assert not informative(step)
    config = make_config(
        algorithm={"length_strength": 1.0, "normalize_std": False, "overlong_margin": 0.5}, sampling={"max_tokens": 8}
    )
    (short, long) = (advantages[0] for _, advantages, _ in credited(step, config, parts=1))
    rewards = 1 / (1 + 2 / 4), 1 / (1 + 6 / 4) - 0.5
    assert (short, long) == pytest.approx(((rewards[0] - rewards[1]) / 2, (rewards[1] - rewards[0]) / 2))


def test_the_longest_answer_of_several_turns_fills_the_context() -> None:
    assert longest_answer(make_config(sampling={"max_tokens": 8})) == 8
    several = {"rollout": {"tools": ["a.py:f"], "max_turns": 3}, "engine": {"max_model_len": 20}}
    assert longest_answer(make_config(sampling={"max_tokens": 5}, **several)) == 15
    assert longest_answer(make_config(sampling={"max_tokens": 8}, **several)) == 20


@pytest.mark.parametrize("algorithm", [{"advantage": "max_rl"}, {"length_strength": 0.1}])
def test_negative_rewards_are_named_where_they_cannot_be(algorithm: dict[str, Any]) -> None:
    step = random_step(2, 2, seed=6)
    step[0].reward, step[0].reward_parts = -2.0, {"format": -2.0}
    with pytest.raises(UserError, match=r"needs rewards of at least 0, but an answer got -2 \({'format': -2.0}\)"):
        credited(step, make_config(algorithm=algorithm))


def test_p15_a_group_without_a_spread_has_no_advantages_whatever_its_size() -> None:
    alike = [Trajectory(p, s, [1], [2, 3], [1, 1], [-1.0] * 2, reward=0.1) for p in range(2) for s in range(3)]
    for advantage in ("group", "leave_one_out", "max_rl", "reinforce_pp", "reinforce_pp_baseline"):
        config = make_config(algorithm={"advantage": advantage})
        for step in (alike, alike[:1], [alike[0], alike[3]], []):
            minibatches = [prepare(groups, config, 0, CPU) for groups in split(make_groups(step), 1)]
            assign_credit(minibatches, config, {})
            assert not has_signal(minibatches), advantage


def test_answers_that_were_cut_off_are_compared_but_not_learned_from() -> None:
    step = [Trajectory(0, s, [1], [2, 3], [1, 1], [-1.0] * 2, reward=float(s)) for s in range(3)]
    step[0].finish_reason = "length"
    config = make_config(algorithm={"overlong_filter": True, "normalize_std": False})
    (minibatch,) = [prepare(groups, config, 0, CPU) for groups in split(make_groups(step), 1)]
    assert (minibatch.tokens, minibatch.sequences) == (4, 2)
    assign_credit([minibatch], config, {})
    (batch,) = minibatch.batches
    assert sorted((batch.advantages * batch.loss_mask)[:, 0].tolist()) == [0.0, 0.0, 1.0]
