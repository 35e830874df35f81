"""Advantages of every token of a step equal loops over answers and tokens."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from generation.trajectory import Trajectory, by_episode
from tests.support.learning_steps import as_answers, make_batcher, random_step
from tests.support.recipes import make_config
from trainer.config.answer_age import longest_answer
from trainer.config.schema import TrainConfig
from trainer.errors import UserError
from trainer.learning.credit import assign_credit, has_signal
from trainer.learning.groups import MiniBatch, informative, make_groups, prepare, split
from trainer.learning.learner import mark_high_entropy
from trainer.types import Outputs

IN_REWARD = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
WEIGHTS = {"a": 1.0, "b": 0.5}


def credited(
    step: list[Trajectory], config: TrainConfig, parts: int = 2
) -> list[tuple[Trajectory, list[float], dict]]:
    """Return each answer with the advantages of its response's tokens, and the batch's other columns."""
    generator = torch.Generator().manual_seed(7)
    minibatches = prepare(split(make_groups(as_answers(step)), parts), config, make_batcher(config))
    for minibatch in minibatches:
        for batch in minibatch.batches:
            batch.old_logprobs, batch.ref_logprobs, batch.old_values = (
                torch.randn(batch.loss_mask.shape, generator=generator) for _ in range(3)
            )
    assign_credit(minibatches, config, WEIGHTS)
    return [answer for minibatch in minibatches for answer in _answers(minibatch)]


def _answers(minibatch: MiniBatch) -> list[tuple[Trajectory, list[float], dict]]:
    answers = {}
    everyone = [t.trajectory for group in minibatch.groups for episode in group for t in episode]
    for batch in minibatch.batches:
        for row, place in enumerate(batch.rows):
            trajectory = cast(Trajectory, everyone[place])
            first = len(trajectory.prompt_ids) - 1
            part = slice(first, first + len(trajectory.response_ids))
            names = ("old_logprobs", "ref_logprobs", "old_values", "returns", "loss_mask")
            columns = {n: x[row, part].tolist() for n in names if (x := getattr(batch, n)) is not None}
            answers[place] = (trajectory, batch.advantages[row, part].tolist(), columns)
    return [answers[place] for place in range(len(everyone))]


def groups_of(answers: list[tuple[Trajectory, list[float], dict]]) -> list[list[list[int]]]:
    """Return, for each prompt, the positions of its episodes' trajectories; the last one's reward is the episode's."""
    places = [(t.prompt_index, t.sample_index) for t, _, _ in answers]
    episodes = [
        [i for i, other in enumerate(places) if other == place] for place in dict.fromkeys(places)
    ]
    prompts = dict.fromkeys(prompt for prompt, _ in places)
    groups = [[e for e in episodes if places[e[0]][0] == prompt] for prompt in prompts]
    assert any(len(episode) > 1 for group in groups for episode in group) or len(places) < 4
    return groups


def turn_numbers(mask: list[float]) -> list[int]:
    """Return the number of each token's turn, or -1."""
    numbers, turn = [], -1
    for position, trained in enumerate(mask):
        turn += bool(trained) and (position == 0 or not mask[position - 1])
        numbers.append(turn if trained else -1)
    return numbers


def relative(values: list[float], std: bool) -> list[float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return [
        0.0 if max(values) == min(values) else (v - mean) / ((spread + 1e-6) if std else 1.0)
        for v in values
    ]


@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [
        ({}, lambda r: relative(r, True)),
        ({"normalize_std": False}, lambda r: relative(r, False)),
        (
            {"advantage": "leave_one_out"},
            lambda r: [0.0 if len(r) == 1 else x - (sum(r) - x) / (len(r) - 1) for x in r],
        ),
        (
            {"advantage": "max_rl", "kl_coef": 0.0},
            lambda r: [x / (sum(r) / len(r)) - 1 if sum(r) else 0.0 for x in r],
        ),
    ],
)
@pytest.mark.parametrize("kl", [False, True])
def test_answers_are_compared_within_their_group(
    algorithm: dict[str, Any], formula: Any, kl: bool
) -> None:
    algorithm = (IN_REWARD if kl else {}) | algorithm
    kl = kl and algorithm["kl_coef"] > 0
    answers = credited(random_step(4, 4, seed=1), make_config(algorithm=algorithm))
    for episodes in groups_of(answers):
        rewards = []
        for episode in episodes:
            reward = answers[episode[-1]][0].reward
            for columns in (answers[i][2] for i in episode):
                drift = zip(
                    columns["loss_mask"], columns["old_logprobs"], columns["ref_logprobs"], strict=True
                )
                reward -= kl * 0.1 * sum(m * (old - ref) for m, old, ref in drift)
            rewards.append(reward)
        for episode, expected in zip(episodes, formula(rewards), strict=True):
            for got in (answers[i][1] for i in episode):
                assert got == pytest.approx([expected] * len(got), abs=2e-5)


def rewards_by_turn(
    answers: list[tuple[Trajectory, list[float], dict]], episode: list[int]
) -> list[list[float]]:
    """Return the rewards of the turns of each trajectory of an episode; the very last turn has the rest of
    its reward.
    """
    rewards = []
    for trajectory, _, columns in (answers[i] for i in episode):
        turns = max(turn_numbers(columns["loss_mask"])) + 1
        rewards.append((trajectory.turn_rewards or [0.0] * turns)[:turns])
    rewards[-1][-1] = 0.0
    rewards[-1][-1] = answers[episode[-1]][0].reward - sum(map(sum, rewards))
    return rewards


@pytest.mark.parametrize("std", [True, False])
def test_turns_are_compared_with_the_same_turn_of_others(std: bool) -> None:
    """A turn has its own reward and the discounted later ones; the last turn has the reward that no turn was given."""
    algorithm = {"credit": "turns", "gamma": 0.9, "normalize_std": std}
    answers = credited(random_step(4, 4, seed=2), make_config(algorithm=algorithm))
    for episodes in groups_of(answers):
        returns = {}
        for number, episode in enumerate(episodes):
            rewards = [
                reward
                for trajectory_rewards in rewards_by_turn(answers, episode)
                for reward in trajectory_rewards
            ]
            for turn in range(len(rewards)):
                returns[number, turn] = sum(0.9**k * reward for k, reward in enumerate(rewards[turn:]))
        for number, episode in enumerate(episodes):
            before = 0
            for i in episode:
                turns = turn_numbers(answers[i][2]["loss_mask"])
                for turn, got in zip(turns, answers[i][1], strict=True):
                    expected = 0.0
                    if turn >= 0:
                        peers = [key for key in returns if key[1] == before + turn]
                        expected = relative([returns[key] for key in peers], std)[
                            peers.index((number, before + turn))
                        ]
                    assert got == pytest.approx(expected, abs=2e-5)
                before += max(turns) + 1


@pytest.mark.parametrize("credit", ["outcome", "turns"])
@pytest.mark.parametrize("advantage", ["reinforce_pp", "gae"])
def test_tokens_get_their_return_whitened_over_the_step(advantage: str, credit: str) -> None:
    """Rewards at the ends of turns or of the episode, less KL, are summed backwards, with or without a critic, and
    whitened.
    """
    algorithm = {"advantage": advantage, "credit": credit, "gamma": 0.9, "gae_lambda": 0.8, **IN_REWARD}
    answers = credited(random_step(4, 4, seed=3), make_config(algorithm=algorithm))
    raw: list[list[float]] = []
    # Of each trajectory's turns; its last has in addition whatever the episode was given after it
    at_ends = {}
    for episode in (episode for episodes in groups_of(answers) for episode in episodes):
        by_turn = rewards_by_turn(answers, episode)
        for place, i in enumerate(episode):
            at_ends[i] = [*by_turn[place][:-1], by_turn[place][-1] + sum(map(sum, by_turn[place + 1 :]))]
            if credit == "outcome":
                at_ends[i] = [0.0] * (len(by_turn[place]) - 1) + [answers[episode[-1]][0].reward]
    for place, (_, _, columns) in enumerate(answers):
        numbers, turn_rewards = turn_numbers(columns["loss_mask"]), at_ends[place]
        row = [0.0] * len(numbers)
        upcoming = value_after = 0.0
        for t in reversed(range(len(numbers))):
            if numbers[t] < 0:
                continue
            ends = t + 1 == len(numbers) or numbers[t + 1] < 0
            reward = turn_rewards[numbers[t]] * ends - 0.1 * (
                columns["old_logprobs"][t] - columns["ref_logprobs"][t]
            )
            if advantage == "gae":
                value = columns["old_values"][t]
                upcoming = reward + 0.9 * value_after - value + 0.9 * 0.8 * upcoming
                assert columns["returns"][t] == pytest.approx(upcoming + value, abs=1e-5)
                value_after = value
            else:
                upcoming = reward + 0.9 * upcoming
            row[t] = upcoming
        raw.append(row)
    masks = [columns["loss_mask"] for _, _, columns in answers]
    counted = [
        x for row, mask in zip(raw, masks, strict=True) for x, m in zip(row, mask, strict=True) if m
    ]
    white = iter(relative(counted, True))
    for (_, got, _), mask in zip(answers, masks, strict=True):
        assert got == pytest.approx([next(white) if m else 0.0 for m in mask], abs=2e-5)


def test_reinforce_pp_baseline_is_relative_to_the_group_and_then_to_the_step() -> None:
    answers = credited(
        random_step(4, 4, seed=4), make_config(algorithm={"advantage": "reinforce_pp_baseline"})
    )
    centred = {}
    for episodes in groups_of(answers):
        values = relative([answers[episode[-1]][0].reward for episode in episodes], False)
        centred |= {i: value for episode, value in zip(episodes, values, strict=True) for i in episode}
    tokens = [(i, m) for i, (_, _, columns) in enumerate(answers) for m in columns["loss_mask"]]
    white = iter(relative([centred[i] for i, m in tokens if m], True))
    expected = [next(white) if m else 0.0 for i, m in tokens]
    assert [x for _, got, _ in answers for x in got] == pytest.approx(expected, abs=2e-5)


def test_each_reward_is_made_relative_by_itself_before_they_are_added() -> None:
    """The rewards of both functions and of the episode are relative; the penalty for long answers is added less its
    mean.
    """
    config = make_config(
        algorithm={"combine_rewards": "normalize_then_sum", "overlong_margin": 0.5},
        sampling={"max_tokens": 8},
    )
    answers = credited(random_step(4, 4, seed=5), config)
    for episodes in groups_of(answers):
        last = [answers[episode[-1]][0] for episode in episodes]
        longest = [max(sum(answers[i][0].loss_mask) for i in episode) for episode in episodes]
        remainder = [t.reward - t.reward_parts["a"] - 0.5 * t.reward_parts["b"] for t in last]
        total = zip(
            relative([t.reward_parts["a"] for t in last], True),
            [0.5 * x for x in relative([t.reward_parts["b"] for t in last], True)],
            relative([round(x, 9) for x in remainder], True),
            relative([-min(max(n - 4, 0) / 4, 1.0) for n in longest], False),
            strict=True,
        )
        for episode, parts in zip(episodes, total, strict=True):
            assert [answers[i][1][0] for i in episode] == pytest.approx(
                [sum(parts)] * len(episode), abs=1e-4
            )


def one_turn(sample: int, tokens: int, prompt: int = 0, **fields: Any) -> Trajectory:
    return Trajectory(prompt, sample, [1], [2] * tokens, [1] * tokens, [-1.0] * tokens, **fields)


def first_advantages(step: list[Trajectory], config: TrainConfig) -> list[float]:
    """Return the advantage of the first token of each trajectory."""
    return [advantages[0] for _, advantages, _ in credited(step, config, parts=1)]


def test_leave_one_out_of_an_episode_in_parts_is_skyrls_step_wise_training() -> None:
    """1, 1, 1, -1, as SkyRL's `RayPPOTrainer.compute_advantages_and_returns` (skyrl/train/trainer.py) has it.

    There the last step of each trajectory is put through `compute_rloo_outcome_advantage`, here rewards of 1 and 0, and
    the result is given to all its steps. With each part as a sample of its own it would be 1/3, 1/3, 1/3, -1.
    """
    step = [one_turn(0, 2, reward=1.0) for _ in range(3)] + [one_turn(1, 2, reward=0.0)]
    assert first_advantages(step, make_config(algorithm={"advantage": "leave_one_out"})) == [1, 1, 1, -1]
    step[0].reward = step[1].reward = 7.0  # of parts that are not the last
    assert first_advantages(step, make_config(algorithm={"advantage": "leave_one_out"})) == [1, 1, 1, -1]
    assert first_advantages(step, make_config(algorithm={"normalize_std": False})) == [
        0.5,
        0.5,
        0.5,
        -0.5,
    ]


def test_a_proposer_and_a_solver_are_each_compared_with_their_like() -> None:
    """A game of zero sum by `credit: turns` and `gamma: 0`, as docs/algorithms.md describes it."""
    wins = [1.0, 0.0, 0.0, 0.25]  # of the solver; the proposer gets the rest
    step = []
    for number, won in enumerate(wins):
        proposer, solver = one_turn(number, 2, reward=0.0), one_turn(number, 3, reward=1.0)
        proposer.turn_rewards, solver.turn_rewards = [1 - won], [won]
        step += [proposer, solver]
    algorithm = {"credit": "turns", "gamma": 0.0, "normalize_std": False}
    advantages = first_advantages(step, make_config(algorithm=algorithm))
    mean = sum(wins) / len(wins)
    assert advantages[1::2] == pytest.approx([won - mean for won in wins])
    assert advantages[0::2] == pytest.approx([mean - won for won in wins])


def test_a_groups_signal_depends_on_its_episodes() -> None:
    first, second, other = (one_turn(s, 2, reward=r) for s, r in ((0, 0.0), (0, 1.0), (1, 1.0)))
    (group,) = make_groups(as_answers([first, second, other]))
    assert not informative(group)
    group[0][0].turn_rewards = [0.5]
    assert informative(group)
    first.error = "a part of the episode failed"
    ((episode,),) = make_groups(as_answers([first, second, other]))
    assert [answer.trajectory for answer in episode] == [other]


def test_length_is_the_episodes_and_the_overlong_penalty_its_longest_parts() -> None:
    step = [one_turn(0, 3, reward=1.0), one_turn(0, 5, reward=1.0), one_turn(1, 2, reward=1.0)]
    config = make_config(
        algorithm={"length_strength": 1.0, "normalize_std": False}, sampling={"max_tokens": 8}
    )
    worth = 1 / (1 + 8 / 5), 1 / (1 + 2 / 5)
    assert first_advantages(step, config) == pytest.approx(
        [(worth[0] - worth[1]) / 2] * 2 + [(worth[1] - worth[0]) / 2]
    )
    config = make_config(
        algorithm={"overlong_margin": 0.5, "normalize_std": False}, sampling={"max_tokens": 8}
    )
    assert first_advantages(step, config) == pytest.approx([-0.125, -0.125, 0.125])


def test_a_token_over_the_margin_costs_little_with_rewards_normalised_apart() -> None:
    """Two of eight answers are right; one of them is a token over the margin of 800, and so loses 1/800."""
    lengths = [201, *[100] * 7]
    rewards = [1.0, 1.0, *[0.0] * 6]
    step = [
        one_turn(s, n, reward=r, reward_parts={"a": r})
        for s, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    ]
    algorithm = {"combine_rewards": "normalize_then_sum", "overlong_margin": 0.8}
    config = make_config(algorithm=algorithm, sampling={"max_tokens": 1000})
    minibatches = prepare([make_groups(as_answers(step))], config, make_batcher(config))
    assign_credit(minibatches, config, {"a": 1.0})
    got = [advantages[0] for _, advantages, _ in _answers(minibatches[0])]
    penalties = relative([-1 / 800, *[0.0] * 7], False)
    expected = [a + b for a, b in zip(relative(rewards, True), penalties, strict=True)]
    assert got == pytest.approx(expected, abs=1e-5)
    assert got[0] == pytest.approx(1.731, abs=1e-3) and got[1] == pytest.approx(1.732, abs=1e-3)


def test_separate_rewards_compare_only_the_answers_that_a_function_has_judged() -> None:
    config = make_config(algorithm={"combine_rewards": "normalize_then_sum"})
    all_parts = [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}, {"b": 0.0}, {"a": 3.0}]
    step = [one_turn(s, 2, reward_parts=parts) for s, parts in enumerate(all_parts)]
    for trajectory in step:
        parts = trajectory.reward_parts
        trajectory.reward = parts.get("a", 0.0) + 0.5 * parts.get("b", 0.0)
    first = relative([1.0, 0.0, 3.0], True)
    second = relative([0.5, 1.0, 0.0], True)
    expected = [first[0] + 0.5 * second[0], first[1] + 0.5 * second[1], 0.5 * second[2], first[2]]
    assert first_advantages(step, config) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("instead", [0.0, -1.0])
def test_a_failed_reward_function_adds_no_separate_reward(instead: float) -> None:
    """The answer counts as one with `reward.error_reward` from the function, and the other answers are not affected."""
    config = make_config(
        algorithm={"combine_rewards": "normalize_then_sum"}, reward={"error_reward": instead}
    )
    all_parts = [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0}]
    step = [one_turn(s, 2, reward_parts=parts) for s, parts in enumerate(all_parts)]
    for trajectory in step:
        parts = trajectory.reward_parts
        trajectory.reward = 0.25 + (parts["a"] + 0.5 * parts["b"] if "b" in parts else instead)
        trajectory.reward_error = "" if "b" in parts else "b failed"
    expected = [
        a + 0.5 * b
        for a, b in zip(
            relative([1.0, 0.0, 1.0, 1.0], True), relative([0.5, 1.0, 1.0, instead], True), strict=True
        )
    ]
    assert first_advantages(step, config) == pytest.approx(expected, abs=1e-5)


def test_length_shapes_rewards_but_not_which_groups_have_a_signal() -> None:
    def answer(sample: int, tokens: int) -> Trajectory:
        return Trajectory(0, sample, [1], [2] * tokens, [1] * tokens, [-1.0] * tokens, reward=1.0)

    step = [answer(0, 2), answer(1, 6)]
    assert not informative([[answer] for answer in as_answers(step)])
    config = make_config(
        algorithm={"length_strength": 1.0, "normalize_std": False, "overlong_margin": 0.5},
        sampling={"max_tokens": 8},
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
    for trajectory in by_episode(step)[0]:
        trajectory.reward, trajectory.reward_parts = -2.0, {"format": -2.0}
    with pytest.raises(
        UserError, match=r"needs rewards of at least 0, but an answer got -2 \({'format': -2.0}\)"
    ):
        credited(step, make_config(algorithm=algorithm))


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    alike = [
        Trajectory(p, s, [1], [2, 3], [1, 1], [-1.0] * 2, reward=0.1) for p in range(2) for s in range(3)
    ]
    for advantage in ("group", "leave_one_out", "max_rl", "reinforce_pp", "reinforce_pp_baseline"):
        config = make_config(algorithm={"advantage": advantage})
        for step in (alike, alike[:1], [alike[0], alike[3]], []):
            minibatches = prepare(split(make_groups(as_answers(step)), 1), config, make_batcher(config))
            assign_credit(minibatches, config, {})
            assert not has_signal(minibatches), advantage


def test_cut_off_answers_are_compared_but_not_trained_on() -> None:
    step = [Trajectory(0, s, [1], [2, 3], [1, 1], [-1.0] * 2, reward=float(s)) for s in range(3)]
    step[0].finish_reason = "length"
    config = make_config(algorithm={"overlong_filter": True, "normalize_std": False})
    (minibatch,) = prepare(split(make_groups(as_answers(step)), 1), config, make_batcher(config))
    assert (minibatch.tokens, minibatch.sequences) == (4, 2)
    assign_credit([minibatch], config, {})
    (batch,) = minibatch.batches
    assert sorted((batch.advantages * batch.loss_mask)[:, 0].tolist()) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "leave_one_out", **IN_REWARD},
        {"advantage": "reinforce_pp", **IN_REWARD},
        {"advantage": "reinforce_pp_baseline", "high_entropy_share": 0.5},
        {"advantage": "gae", "credit": "turns", **IN_REWARD},
        {"advantage": "distill"},
        {"credit": "turns"},
    ],
)
def test_model_outputs_for_masked_tokens_do_not_affect_credit(
    algorithm: dict[str, Any], value: float
) -> None:
    """NaN and inf at masked tokens change no advantage or return of trained tokens, nor the choice of tokens or the
    signal.
    """

    def computed(rotten: float) -> tuple[list[Tensor], bool]:
        generator = torch.Generator().manual_seed(7)
        config = make_config(algorithm=algorithm)
        minibatches = prepare(
            split(make_groups(as_answers(random_step(3, 3, seed=8))), 2), config, make_batcher(config)
        )
        batches = [batch for minibatch in minibatches for batch in minibatch.batches]
        for batch in batches:
            mask = batch.loss_mask.bool()
            noise = [torch.randn(mask.shape, generator=generator) for _ in range(4)]
            columns = [torch.where(mask, x, rotten) for x in noise]
            batch.old_logprobs, batch.ref_logprobs, batch.old_values = columns[:3]
            mark_high_entropy([batch], [Outputs(columns[0], columns[3])], 0.5)
        assign_credit(minibatches, config, WEIGHTS)
        masks = [batch.loss_mask.bool() for batch in batches]
        credit = [batch.advantages[mask] for batch, mask in zip(batches, masks, strict=True)]
        credit += [
            b.returns[mask] for b, mask in zip(batches, masks, strict=True) if b.returns is not None
        ]
        return [
            *credit,
            *(batch.high_entropy for batch in batches if batch.high_entropy is not None),
        ], has_signal(minibatches)

    (sound, _), (got, signal) = computed(0.0), computed(value)
    assert signal and len(sound) == len(got)
    assert all(torch.isfinite(x).all() and torch.equal(x, y) for x, y in zip(got, sound, strict=True))


def test_a_step_with_only_masked_tokens_has_no_signal() -> None:
    alike = [one_turn(s, 2 + s, reward=1.0) for s in range(2)]
    config = make_config()
    minibatches = prepare([make_groups(as_answers(alike))], config, make_batcher(config))
    assign_credit(minibatches, config, {})
    for batch in minibatches[0].batches:
        batch.advantages = torch.where(batch.loss_mask.bool(), batch.advantages, float("nan"))
    assert not has_signal(minibatches)
