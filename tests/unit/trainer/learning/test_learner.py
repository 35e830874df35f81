"""The way from trajectories to the batch of an update: groups, masks, counts, figures."""

import pytest
import torch

from generation.trajectory import Trajectory
from tests.support.learning_steps import as_answers, as_step, make_batcher, on_ranks
from tests.support.recipes import make_config
from trainer.learning import Learner, rollout_metrics
from trainer.learning.groups import make_groups, prepare, split, to_sample
from trainer.learning.metrics import GAP_ANSWERS
from trainer.model_structure import ModelFlops, Work
from trainer.types import Outputs, UpdateStats

PAD = 0


def trajectory(
    prompt: int, sample: int, reward: float, response: list[int], **fields: object
) -> Trajectory:
    return Trajectory(
        prompt,
        sample,
        [5, 6],
        response,
        [1] * len(response),
        [-0.5] * len(response),
        reward=reward,
        **fields,  # type: ignore[arg-type]
    )


class RecordingPolicy:
    """A policy that records its calls and returns the engine's log-probabilities."""

    device = torch.device("cpu")
    version = 0
    routing = None
    work = Work(ModelFlops(trunk=1000, trunk_learned=1000, head=0, head_learned=0, attention=100))

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.places: list[float] = []
        self.advantages: list[float] = []

    def score(self, batches, temperature):
        self.calls.append(f"score@{temperature}")
        return [
            Outputs(batch.engine_logprobs, torch.zeros_like(batch.engine_logprobs)) for batch in batches
        ]

    def update(self, batches, loss_fn, temperature, place=None):
        self.calls.append(f"update@{temperature}")
        self.places.append(place)
        totals: dict[str, float] = {}
        loss = 0.0
        for batch in batches:
            self.advantages += batch.advantages[batch.loss_mask.bool()].tolist()
            value, sums = loss_fn(
                batch, Outputs(batch.engine_logprobs.clone(), torch.ones_like(batch.loss_mask))
            )
            loss += value.item()
            totals = {key: totals.get(key, 0.0) + tensor.item() for key, tensor in sums.items()}
        return UpdateStats(loss, 1.0, 1e-3, False, totals)


def test_a_sampled_pad_token_stays_in_the_loss() -> None:
    sample = to_sample(trajectory(0, 0, 1.0, [PAD, 9, PAD]))
    assert sample.input_ids == [5, 6, PAD, 9, PAD]
    assert sample.loss_mask == [0, 0, 1, 1, 1]
    assert sample.engine_logprobs == [0.0, 0.0, -0.5, -0.5, -0.5]
    policy = RecordingPolicy()
    learner = Learner(make_config(), policy, None, pad_id=PAD)  # type: ignore[arg-type]
    metrics = learner.learn(
        *as_step([trajectory(0, 0, 1.0, [PAD, 9, PAD]), trajectory(0, 1, 0.0, [PAD])]), step=1
    )
    assert metrics["train_tokens"] == 4


def test_failed_samples_are_left_out_before_the_groups_mean_is_taken() -> None:
    members = [trajectory(0, i, reward, [7]) for i, reward in enumerate([1.0, 0.0, 100.0])]
    members[2].error = "the request failed"
    policy = RecordingPolicy()
    Learner(make_config(algorithm={"normalize_std": False}), policy, None, pad_id=PAD).learn(
        *as_step(members), step=1
    )  # type: ignore[arg-type]
    assert sorted(policy.advantages) == [-0.5, 0.5]


def test_a_step_without_signal_updates_nothing() -> None:
    policy = RecordingPolicy()
    learner = Learner(make_config(), policy, None, pad_id=PAD)  # type: ignore[arg-type]
    metrics = learner.learn(
        *as_step([trajectory(p, s, 1.0, [7, 8]) for p in range(2) for s in range(4)]), step=1
    )
    assert policy.calls == ["score@1.0"]  # for the gap alone
    assert metrics["no_signal_steps"] == 1


def test_groups_without_signal_can_be_dropped_and_leave_the_count() -> None:
    mixed = [trajectory(0, s, float(s), [7, 8]) for s in range(2)] + [
        trajectory(1, s, 1.0, [7] * 9) for s in range(2)
    ]
    for drop, tokens in ((False, 22), (True, 4)):
        learner = Learner(
            make_config(algorithm={"drop_zero_variance": drop}), RecordingPolicy(), None, pad_id=PAD
        )  # type: ignore[arg-type]
        assert learner.learn(*as_step(mixed), step=1)["train_tokens"] == tokens


@pytest.mark.parametrize(
    ("updates", "iterations", "expected"),
    [
        (1, 1, ["update@0.7"]),
        (2, 1, ["score@0.7"] * 2 + ["update@0.7"] * 2),
        (1, 3, ["score@0.7"] + ["update@0.7"] * 3),
    ],
)
def test_old_logprobs_are_computed_only_when_the_policy_changes_within_the_step(
    updates: int, iterations: int, expected: list[str]
) -> None:
    policy = RecordingPolicy()
    settings = make_config(
        algorithm={"num_iterations": iterations},
        batch={"updates_per_step": updates},
        sampling={"temperature": 0.7},
    )
    steps = [trajectory(p, s, float(s), [7, 8]) for p in range(4) for s in range(2)]
    Learner(settings, policy, None, pad_id=PAD).learn(*as_step(steps), step=1)  # type: ignore[arg-type]
    assert policy.calls == expected


@pytest.mark.parametrize(
    ("prompts", "parts"), [(5, 1), (10, 4), (13, 4), (5, 3), (33, 16), (3, 7), (0, 2)]
)
def test_a_step_is_split_evenly_into_updates(prompts: int, parts: int) -> None:
    groups = make_groups(
        as_answers([trajectory(p, s, float(s), [7]) for p in range(prompts) for s in range(2)])
    )
    portions = split(groups, parts)
    assert [group for portion in portions for group in portion] == groups
    assert len(portions) == min(parts, prompts)
    assert not portions or max(map(len, portions)) - min(map(len, portions)) <= 1


@pytest.mark.parametrize(
    ("informative", "places"), [(4, [8, 9, 10, 11]), (2, [8, 10]), (3, [8, 9 + 1 / 3, 10 + 2 / 3])]
)
def test_fewer_groups_than_updates_get_one_update_each(informative: int, places: list[float]) -> None:
    """The third step of a run with four updates a step begins after 8 planned updates."""
    settings = make_config(
        algorithm={"drop_zero_variance": True},
        batch={"prompts_per_step": 4, "updates_per_step": 4},
        run={"steps": 9},
    )
    policy = RecordingPolicy()
    step = [
        trajectory(p, s, float(s if p < informative else 1), [7, 8]) for p in range(4) for s in range(2)
    ]
    metrics = Learner(settings, policy, None, pad_id=PAD).learn(*as_step(step), step=3)  # type: ignore[arg-type]
    assert policy.places == pytest.approx(places, abs=1e-12) and metrics["updates"] == informative
    assert all(place == int(place) for place in policy.places) or informative == 3


@pytest.mark.parametrize("algorithm", [{}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}])
def test_a_step_with_every_token_filtered_has_no_update(algorithm: dict[str, object]) -> None:
    """KL and entropy pull at trained tokens only: without any, Adam's momentum would move the weights by itself."""
    settings = make_config(
        algorithm={"overlong_filter": True, **algorithm}, batch={"updates_per_step": 2}
    )
    for cut, updates in ((2, 0), (1, 1), (0, 2)):
        policy, reference = RecordingPolicy(), RecordingPolicy()
        step = [
            trajectory(p, s, float(s), [7, 8], finish_reason="length" if p < cut else "stop")
            for p in range(2)
            for s in range(2)
        ]
        learner = Learner(settings, policy, reference if "kl_coef" in algorithm else None, PAD)  # type: ignore[arg-type]
        metrics = learner.learn(*as_step(step), step=1)
        assert policy.calls.count("update@1.0") == metrics["updates"] == updates
        assert metrics["no_signal_steps"] == (updates == 0)


def test_the_first_token_is_not_counted_without_a_prompt_to_predict_it() -> None:
    answers = [
        Trajectory(0, s, [], [7] * n, [1] * n, [-1.0] * n, reward=float(s)) for s, n in enumerate((1, 3))
    ]
    [minibatch] = prepare([make_groups(as_answers(answers))], make_config(), make_batcher(make_config()))
    trained = [mask.sum().item() for batch in minibatch.batches for mask in batch.loss_mask]
    assert minibatch.tokens == sum(trained) == 2 and minibatch.sequences == sum(map(bool, trained)) == 1


class ShiftedPolicy(RecordingPolicy):
    """A policy whose log-probability of token n is (n - 7) / 100 above the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.scored = 0

    def score(self, batches, temperature):
        self.scored += sum(len(batch.rows) for batch in batches)
        shifts = [(batch.input_ids[:, 1:] - 7) / 100 * batch.loss_mask for batch in batches]
        return [Outputs(b.engine_logprobs + s, s) for b, s in zip(batches, shifts, strict=True)]


CUT = {"algorithm": {"overlong_filter": True}}


@pytest.mark.parametrize(
    "settings",
    [{}, {"algorithm": {"drop_zero_variance": True}}, {"batch": {"updates_per_step": 2}}, CUT],
)
def test_the_gap_is_measured_where_nothing_is_learned(settings: dict[str, dict[str, object]]) -> None:
    """The gap is measured where no group has a signal, kept or dropped, and where every answer is cut off and
    left out.
    """
    steps = [trajectory(p, s, 1.0, [7, 8] if p else [7, 12]) for p in range(2) for s in range(4)]
    if settings is CUT:
        steps = [
            trajectory(p, s, float(s), [7, 7 + 5 * (p == 0)], finish_reason="length")
            for p in range(2)
            for s in range(4)
        ]
    failed = Trajectory(1, 9, [5], finish_reason="error", error="x")
    learner = Learner(make_config(**settings), ShiftedPolicy(), None, pad_id=PAD)  # type: ignore[arg-type]
    metrics = learner.learn(*as_step([*steps, failed]), step=1)
    distances = sorted(abs(token - 7) / 100 for t in steps for token in t.response_ids)
    assert metrics["gap/max"] == pytest.approx(distances[-1], abs=1e-6)
    assert metrics["gap/mean"] == pytest.approx(sum(distances) / len(distances), abs=1e-6)


def test_the_gap_of_a_large_step_is_measured_alike_on_any_number_of_ranks() -> None:
    steps = [trajectory(p, s, 1.0, [7 + p, 7]) for p in range(20) for s in range(8)]

    def learned() -> tuple[dict[str, float], int]:
        policy = ShiftedPolicy()
        return Learner(make_config(), policy, None, pad_id=PAD).learn(
            *as_step(list(steps)), step=1
        ), policy.scored  # type: ignore[arg-type]

    (alone, scored), *_ = on_ranks(1, learned)
    assert scored == GAP_ANSWERS
    chosen = [token for t in steps[:: len(steps) // GAP_ANSWERS] for token in t.response_ids]
    assert alone["gap/mean"] == pytest.approx(
        sum(token - 7 for token in chosen) / len(chosen) / 100, abs=1e-6
    )
    together = on_ranks(3, learned)
    assert sum(count for _, count in together) == GAP_ANSWERS
    for metrics, _ in together:
        assert metrics["gap/max"] == alone["gap/max"] and metrics["gap/mean"] == pytest.approx(
            alone["gap/mean"]
        )


def test_a_gap_that_cannot_be_measured_is_absent() -> None:
    failed = [Trajectory(0, s, [5], finish_reason="error", error="x") for s in range(4)]
    policy = RecordingPolicy()
    metrics = Learner(make_config(), policy, None, pad_id=PAD).learn(*as_step(failed), step=1)  # type: ignore[arg-type]
    assert not any(name.startswith("gap/") for name in metrics) and policy.calls == []


class RecordingCritic:
    """A critic that expects half a reward in every state, and records its calls and its loss."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []

    def score(self, batches):
        self.calls.append("score")
        return [0.5 * batch.loss_mask for batch in batches]

    def update(self, batches, loss_fn, place=None):
        self.calls.append("update")
        results = [loss_fn(batch, 0.5 * batch.loss_mask) for batch in batches]
        self.losses.append(sum(loss.item() for loss, _ in results))
        sums = {key: sum(sums[key].item() for _, sums in results) for key in results[0][1]}
        return UpdateStats(self.losses[-1], 1.0, 1e-3, False, sums)


def test_a_critic_learns_from_a_step_without_a_signal_for_the_policy() -> None:
    """Whitened advantages are all 0 where all answers are the same; the returns are still 1, and the values 0.5."""
    policy, critic = RecordingPolicy(), RecordingCritic()
    settings = make_config(algorithm={"preset": "ppo", "gae_lambda": 1.0, "num_iterations": 2})
    steps = [trajectory(p, s, 1.0, [7, 8]) for p in range(2) for s in range(4)]
    metrics = Learner(settings, policy, None, PAD, critic=critic).learn(*as_step(steps), step=1)  # type: ignore[arg-type]
    assert "update@1.0" not in policy.calls and critic.calls == ["score", "update", "update"]
    assert critic.losses == pytest.approx([0.125] * 2) and metrics["value/loss"] == pytest.approx(0.125)
    assert (
        metrics["no_signal_steps"] == 1
        and metrics["value/return"] == 1
        and metrics["value/explained"] == 0
    )


def test_kl_or_entropy_alone_is_worth_an_update() -> None:
    alike = [trajectory(0, s, 1.0, [7, 8]) for s in range(4)]
    for algorithm in ({"entropy_coef": 0.1}, {"kl_coef": 0.1}):
        policy, reference = RecordingPolicy(), RecordingPolicy()
        learner = Learner(make_config(algorithm=algorithm), policy, reference, PAD)  # type: ignore[arg-type]
        assert (
            learner.learn(*as_step(alike), step=1)["no_signal_steps"] == 0
            and "update@1.0" in policy.calls
        )


@pytest.mark.parametrize(
    "algorithm", [{"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, {"high_entropy_share": 0.5}]
)
def test_inputs_of_credit_and_token_choice_are_scored_before_updates(
    algorithm: dict[str, object],
) -> None:
    policy, reference = RecordingPolicy(), RecordingPolicy()
    learner = Learner(make_config(algorithm=algorithm), policy, reference, PAD)  # type: ignore[arg-type]
    learner.learn(*as_step([trajectory(0, s, float(s), [7, 8]) for s in range(4)]), step=1)
    assert policy.calls == ["score@1.0", "update@1.0"]


def test_rollout_metrics_count_rewards_lengths_and_failures() -> None:
    rows = [
        trajectory(0, 0, 1.0, [7, 8], reward_parts={"a": 1.0}),
        trajectory(0, 1, 0.0, [7] * 4, reward_parts={"a": 0.0}),
    ]
    rows[1].finish_reason = "length"
    rows[1].reward_error = "a raised"
    failed = Trajectory(0, 2, [5], finish_reason="error", error="x")
    metrics = rollout_metrics(as_answers([*rows, failed]))
    assert metrics["reward/mean"] == metrics["reward/a"] == metrics["length/truncated"] == 0.5
    assert (metrics["length/mean"], metrics["length/max"], metrics["rollout_tokens"]) == (3, 4, 6)
    assert (metrics["reward/errors"], metrics["rollout/failed"]) == (1, 1)
    assert rollout_metrics(as_answers([failed]))["reward/mean"] == 0.0


def test_the_share_of_cut_answers_that_went_on_after_an_end_is_a_mean() -> None:
    rows = [
        Trajectory(0, n, [1], [5], [1], [-0.5], finish_reason="length" if n < 4 else "stop")
        for n in range(6)
    ]
    for row in rows[:4]:
        row.metrics["length/past_end"] = float(row.sample_index == 2)
    metrics = rollout_metrics(as_answers(rows))
    assert metrics["length/past_end"] == 1 / 4 and metrics["length/truncated"] == 4 / 6
    assert "length/past_end" not in rollout_metrics(as_answers(rows[4:]))


def test_rollout_metrics_count_an_episode_once() -> None:
    """The last part of an episode of two stands for it; the other episode is short, and has no reward."""
    rows = [
        trajectory(0, 0, 5.0, [7] * 4, reward_parts={"a": 5.0}, finish_reason="length"),
        trajectory(0, 0, 1.0, [7] * 2, reward_parts={"a": 1.0}),
        trajectory(0, 1, 0.0, [7] * 2, reward_parts={"a": 0.0}),
        trajectory(0, 2, 9.0, [7] * 2),
        trajectory(0, 2, 9.0, [7] * 2, error="this part failed"),
    ]
    metrics = rollout_metrics(as_answers(rows))
    assert metrics["reward/mean"] == metrics["reward/std"] == metrics["reward/a"] == 0.5
    assert (metrics["length/mean"], metrics["length/max"], metrics["turns/mean"]) == (4, 6, 1.5)
    assert (metrics["length/truncated"], metrics["rollout/failed"], metrics["rollout_tokens"]) == (
        0,
        1,
        8,
    )
