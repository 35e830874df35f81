"""From trajectories to the batch the policy is updated on: groups, masks, counts, figures."""

import pytest
import torch

from generation.trajectory import Trajectory
from trainer.config import AlgorithmConfig, TrainConfig
from trainer.learner import GrpoLoss, Learner, make_groups, rollout_metrics, split, to_sample
from trainer.policy.base import Outputs, UpdateStats

PAD = 0


def trajectory(prompt: int, sample: int, reward: float, response: list[int], **fields: object) -> Trajectory:
    return Trajectory(
        prompt, sample, [5, 6], response, [1] * len(response), [-0.5] * len(response), reward=reward,
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def config(**sections: dict[str, object]) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)


class RecordingPolicy:
    """Remembers what it was asked for; its log-probabilities are the engine's."""

    device = torch.device("cpu")
    version = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def score(self, batches, temperature):
        self.calls.append(f"score@{temperature}")
        return [Outputs(batch.engine_logprobs, torch.zeros_like(batch.engine_logprobs)) for batch in batches]

    def update(self, batches, loss_fn, temperature):
        self.calls.append(f"update@{temperature}")
        totals: dict[str, float] = {}
        loss = 0.0
        for batch in batches:
            value, sums = loss_fn(batch, Outputs(batch.engine_logprobs.clone(), torch.ones_like(batch.loss_mask)))
            loss += value.item()
            totals = {key: totals.get(key, 0.0) + tensor.item() for key, tensor in sums.items()}
        return UpdateStats(loss, 1.0, 1e-3, False, totals)


def test_p22_a_sampled_pad_token_stays_in_the_loss() -> None:
    sample = to_sample(trajectory(0, 0, 1.0, [PAD, 9, PAD]), 0.5)
    assert sample.input_ids == [5, 6, PAD, 9, PAD]
    assert sample.loss_mask == [0, 0, 1, 1, 1]
    assert sample.engine_logprobs == [0.0, 0.0, -0.5, -0.5, -0.5]
    policy = RecordingPolicy()
    learner = Learner(config(), policy, None, pad_id=PAD)  # type: ignore[arg-type]
    metrics = learner.learn([trajectory(0, 0, 1.0, [PAD, 9, PAD]), trajectory(0, 1, 0.0, [PAD])])
    assert metrics["train_tokens"] == 4


def test_failed_samples_are_left_out_before_the_groups_mean_is_taken() -> None:
    members = [trajectory(0, i, reward, [7]) for i, reward in enumerate([1.0, 0.0, 100.0])]
    members[2].error = "the request failed"
    (group,) = make_groups(members, AlgorithmConfig(normalize_std=False))
    assert [sample.advantage for sample in group.samples] == [0.5, -0.5]


def test_p15_a_step_without_signal_updates_nothing() -> None:
    policy = RecordingPolicy()
    learner = Learner(config(), policy, None, pad_id=PAD)  # type: ignore[arg-type]
    metrics = learner.learn([trajectory(p, s, 1.0, [7, 8]) for p in range(2) for s in range(4)])
    assert policy.calls == []
    assert metrics["no_signal_steps"] == 1


def test_groups_without_signal_can_be_dropped_and_leave_the_count() -> None:
    mixed = [trajectory(0, s, float(s), [7, 8]) for s in range(2)] + [trajectory(1, s, 1.0, [7] * 9) for s in range(2)]
    assert len(make_groups(mixed, AlgorithmConfig())) == 2
    assert len(make_groups(mixed, AlgorithmConfig(drop_zero_variance=True))) == 1


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
    settings = config(
        algorithm={"num_iterations": iterations}, batch={"updates_per_step": updates}, sampling={"temperature": 0.7}
    )
    steps = [trajectory(p, s, float(s), [7, 8]) for p in range(4) for s in range(2)]
    Learner(settings, policy, None, pad_id=PAD).learn(steps)  # type: ignore[arg-type]
    assert policy.calls == expected


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_groups_are_split_evenly_and_never_torn(parts: int) -> None:
    groups = make_groups([trajectory(p, s, float(s), [7]) for p in range(5) for s in range(2)], AlgorithmConfig())
    portions = split(groups, parts)
    assert [g for portion in portions for g in portion] == groups
    assert len(portions) <= parts
    assert max(map(len, portions)) - min(map(len, portions)) <= -(-5 // parts) - 1 + (parts == 1)


def test_the_loss_equals_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    algorithm = AlgorithmConfig(clip_low=0.1, clip_high=0.2, tis_cap=1.5, kl_coef=0.3)
    from trainer.batching import MicroBatch

    shape = (3, 5)
    mask = (torch.rand(shape) > 0.3).float()
    engine, old, ref, new = (torch.randn(shape) * 0.3 - 1 for _ in range(4))
    advantages = torch.tensor([1.0, -2.0, 0.5])[:, None].expand(3, 5)
    batch = MicroBatch(torch.zeros(3, 6, dtype=torch.int64), mask, engine, advantages, [6, 6, 6], [0, 1, 2], old, ref)
    loss, sums = GrpoLoss(algorithm, 17.0)(batch, Outputs(new, torch.ones(shape)))
    expected = 0.0
    for i in range(3):
        for t in range(5):
            if mask[i, t]:
                ratio = (new[i, t] - old[i, t]).exp().item()
                clipped = min(max(ratio, 0.9), 1.2)
                policy = -min(ratio * advantages[i, 0].item(), clipped * advantages[i, 0].item())
                weight = min((old[i, t] - engine[i, t]).exp().item(), 1.5)
                d = (ref[i, t] - new[i, t]).item()
                expected += (policy * weight + 0.3 * (torch.tensor(d).exp().item() - d - 1)) / 17.0
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sums["tokens"] == mask.sum()


def test_rollout_metrics_count_what_happened() -> None:
    rows = [
        trajectory(0, 0, 1.0, [7, 8], reward_parts={"a": 1.0}),
        trajectory(0, 1, 0.0, [7] * 4, reward_parts={"a": 0.0}),
    ]
    rows[1].finish_reason = "length"
    rows[1].metrics["reward/error"] = 1.0
    failed = Trajectory(0, 2, [5], finish_reason="error", error="x")
    metrics = rollout_metrics([*rows, failed])
    assert metrics["reward/mean"] == metrics["reward/a"] == metrics["length/truncated"] == 0.5
    assert (metrics["length/mean"], metrics["length/max"], metrics["rollout_tokens"]) == (3, 4, 6)
    assert (metrics["reward/errors"], metrics["rollout/failed"]) == (1, 1)
    assert rollout_metrics([failed])["reward/mean"] == 0.0
