"""A step's sampling: one round, or as many as it takes to find groups with a signal; and where the next one begins."""

from collections.abc import Sequence
from typing import Any

import pytest

from generation.trajectory import Trajectory
from tests.support.learning_steps import as_answers
from tests.support.recipes import make_config
from trainer.data import Prompt, PromptDataset
from trainer.learning.groups import make_groups
from trainer.rollouts.round import sampled_round
from trainer.rollouts.step_batch import StepBatch

PROMPTS = PromptDataset([Prompt(i, (i,), {}) for i in range(30)])


def empty(**algorithm: Any) -> StepBatch:
    """Return the batch of a step without any round yet."""
    config = make_config(algorithm=algorithm, batch={"prompts_per_step": 4}, run={"seed": 5})
    return StepBatch(config, PROMPTS)


def answers(prompts: list[Prompt]) -> list[Trajectory]:
    """Return two answers for each prompt; those to a prompt whose number is divisible by three are always right."""
    return [
        Trajectory(place, sample, [1], [2], [1], [-1.0], reward=float(sample or prompt.id % 3 == 0))
        for place, prompt in enumerate(prompts)
        for sample in range(2)
    ]


def add(batch: StepBatch, positions: Sequence[int], trajectories: list[Trajectory]) -> None:
    """Add a round of the prompts at these positions."""
    batch.add(sampled_round(as_answers(trajectories), 1, 0, positions, positions[-1] + 1))


def run_step(batch: StepBatch, position: int) -> int:
    """Run all rounds of a step; return the position after it."""
    while batch.missing:
        positions = range(position, position + batch.missing)
        add(batch, positions, answers(PROMPTS.take(position, batch.missing, seed=5)))
        position = batch.position
    return position


def kept(batch: StepBatch) -> list[int]:
    """Return the prompts that are trained on, by number, each with both its answers."""
    kept, groups = batch.kept()
    indices = [t.prompt_index for t in kept]
    assert indices == sorted(list(dict.fromkeys(indices)) * 2)
    assert groups == make_groups(kept)
    return [batch.prompts[index].id for index in dict.fromkeys(indices)]


def test_one_round_trains_on_all_groups() -> None:
    batch = empty()
    assert run_step(batch, 8) == 12
    assert kept(batch) == [p.id for p in PROMPTS.take(8, 4, seed=5)] and batch.metrics() == {}


@pytest.mark.parametrize("oversampling", [1.0, 1.5])
@pytest.mark.parametrize("position", [0, 4, 17])
def test_rounds_go_on_until_enough_groups_have_a_signal(oversampling: float, position: int) -> None:
    """The groups trained on are the first with a signal in the order of prompts, however they were sampled."""
    batch = empty(sampling_rounds=10, oversampling=oversampling)
    end = run_step(batch, position)
    seen = [p.id for p in PROMPTS.take(position, end - position, seed=5)]
    assert [p.id for p in batch.prompts] == seen
    assert kept(batch) == [i for i in seen if i % 3][:4]
    figures = batch.metrics()
    assert figures["sampling/shortfall"] == 0 and figures["sampling/dropped"] == len(seen) - 4
    assert figures["sampling/rounds"] >= 1


@pytest.mark.parametrize("at_bound", ["fewer", "fill"])
def test_rounds_have_a_bound(at_bound: str) -> None:
    batch = empty(sampling_rounds=3, at_bound=at_bound)
    order = PROMPTS.take(0, 30, seed=5)
    hopeless = [position for position, prompt in enumerate(order) if prompt.id % 3 == 0]
    rounds = []
    while batch.missing:
        rounds.append(batch.missing)
        positions = hopeless[: batch.missing]
        add(batch, positions, answers([order[position] for position in positions]))
    assert rounds == [4, 4, 4] and len(kept(batch)) == (0 if at_bound == "fewer" else 4)
    assert batch.metrics() == {
        "sampling/rounds": 3,
        "sampling/shortfall": 4,
        "sampling/dropped": 12 - len(kept(batch)),
    }


def test_failed_answers_do_not_make_a_signal() -> None:
    batch = empty(sampling_rounds=2)
    prompts = PROMPTS.take(0, 4, seed=5)
    failed = answers(prompts)
    for trajectory in failed:
        trajectory.error = "failed" * (trajectory.sample_index == 0)
    add(batch, range(4), failed)
    assert batch.missing == 4


def test_a_resumed_run_samples_the_same_prompts() -> None:
    """Steps take as many prompts as they need, so a checkpoint keeps the position and not the step."""

    def steps(position: int, count: int) -> tuple[list[list[int]], int]:
        seen = []
        for _ in range(count):
            batch = empty(sampling_rounds=5, oversampling=1.3)
            position = run_step(batch, position)
            seen.append([p.id for p in batch.prompts])
        return seen, position

    all_steps, end = steps(0, 6)
    assert len({len(step) for step in all_steps}) > 1
    for stop in range(6):
        before, position = steps(0, stop)
        after, last = steps(position, 6 - stop)
        assert before + after == all_steps and last == end


def test_each_round_has_its_own_seed_and_the_first_has_the_runs() -> None:
    batch = empty(sampling_rounds=3)
    seeds = []
    for _ in range(3):
        seeds.append((batch.seed(1), batch.seed(2)))
        add(batch, range(1), answers(PROMPTS.take(0, 1, seed=5))[:1])
    assert seeds[0] == (5, 5) and len({seed for pair in seeds for seed in pair}) == 5
