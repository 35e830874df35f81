"""Verdicts on runs that learned, that did not, and that are too short to tell, from made rows of metrics.jsonl."""

import random
from typing import Any

import pytest

from trainer.run.records import Rows
from trainer.run.verdict import FEWEST_STEPS, verdict

RECIPE: dict[str, dict[str, Any]] = {
    "batch": {"prompts_per_step": 8},
    "algorithm": {"group_size": 4, "teacher": None},
    "sampling": {"max_tokens": 64},
}
SOUND = {
    "reward/std": 0.4,
    "reward/errors": 0.0,
    "no_signal_steps": 0.0,
    "length/truncated": 0.1,
    "updates": 1.0,
    "skipped_steps": 0.0,
    "grad_norm": 0.5,
    "lr": 1e-4,
}


def run(rewards: list[float], accuracy: tuple[float, ...] = (), **changes: float | None) -> Rows:
    """Return the rows of a run with these rewards, evaluated before its first step and after its last."""
    figures = SOUND | {key.replace("__", "/"): value for key, value in changes.items()}
    figures = {key: value for key, value in figures.items() if value is not None}
    rows: Rows = [
        {"train/step": n, "reward/mean": reward} | figures for n, reward in enumerate(rewards, 1)
    ]
    if accuracy:
        rows = [{"train/step": 0, "eval/accuracy": accuracy[0]}, *rows]
        rows[-1]["eval/accuracy"] = accuracy[-1]
    return rows


def noisy(first: float, last: float, steps: int = 40, scatter: float = 0.05) -> list[float]:
    """Return a straight line with noise of this standard deviation."""
    noise = random.Random(f"{first}{last}{steps}")
    return [first + (last - first) * n / (steps - 1) + noise.gauss(0, scatter) for n in range(steps)]


@pytest.mark.parametrize(
    "rewards",
    [
        noisy(0.3, 0.9),
        noisy(0.3, 0.45),
        noisy(-2.0, -1.5),
        [0.1, 0.3, 0.6, *noisy(0.9, 0.9, 57)],  # at once, and never again
        [*noisy(0.1, 0.1, 60), *noisy(0.1, 0.6, 10)],  # late
        [n / 100 for n in range(40)],
    ],
    ids=["far", "a little", "below 0", "at once", "late", "without noise"],
)
def test_a_run_whose_reward_rose_is_not_told_that_it_has_not_learned(rewards: list[float]) -> None:
    assert verdict(run(rewards), RECIPE) == []


@pytest.mark.parametrize("steps", [0, 1, 5, FEWEST_STEPS - 1])
def test_a_few_steps_are_too_few_to_tell(steps: int) -> None:
    assert verdict(run([0.0] * steps, lr=1e-9, reward__std=0.0), RECIPE) == []
    assert verdict(run([0.0] * FEWEST_STEPS, lr=1e-9, reward__std=0.0), RECIPE)


def test_noise_alone_is_seldom_taken_for_learning() -> None:
    """About one in 44 runs without a trend exceeds two standard errors by chance."""
    risen = 0
    for seed in range(400):
        noise = random.Random(seed)
        risen += not verdict(run([noise.gauss(0.5, 0.1) for _ in range(60)]), RECIPE)
    assert risen <= 24


def test_the_sentence_has_the_change_its_scatter_and_both_evaluations() -> None:
    # Neighbours differ by 0.1: sigma² = 0.005, and 2 sigma sqrt(2 / 13) = 0.055
    rewards = [0.25, 0.35] * 20
    sentence, *_ = verdict(run(rewards, (0.31, 0.3)), RECIPE)
    assert sentence == (
        "This run has not learned: its mean reward went from 0.296 in the first third of 40 steps to 0.304 in the "
        "last, and scatter alone explains ± 0.06; held-out accuracy went from 0.31 to 0.3"
    )
    assert "held-out" not in verdict(run(rewards), RECIPE)[0]
    assert verdict(run(rewards, (0.31, 0.5)), RECIPE) == []  # it has, if not on what it was trained on
    fallen = verdict(run(noisy(0.9, 0.2)), RECIPE)
    assert "its mean reward fell from" in fallen[0]
    assert fallen[1:] == ["policy.lr may be too large: gradient norms were 0.5, and 0.5 at most"]


def test_a_run_that_learns_from_a_teacher_is_not_judged_by_its_reward() -> None:
    assert verdict(run([0.0] * 40, reward__std=0.0), {"algorithm": {"teacher": "larger"}}) == []


FLAT = noisy(0.5, 0.5)


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        (run(FLAT), "no metric shows a cause"),
        (
            run(FLAT, reward__errors=8.0),
            "25% of the answers have no reward, since reward functions failed",
        ),
        (
            run([0.0] * 40, reward__std=0.0, no_signal_steps=1.0, updates=0.0, grad_norm=None, lr=None),
            "reward, 0: ",
        ),
        (
            run(FLAT, no_signal_steps=1.0, updates=0.0, grad_norm=None, lr=None),
            "in 40 of 40 steps no group had",
        ),
        (
            run(FLAT, length__truncated=0.9),
            "90% of the answers were cut off at the length limit: raise sampling.max_",
        ),
        (
            run(FLAT, length__truncated=0.9, length__past_end=0.6),
            "90% of the answers were cut off at the length limit, and 60% of these went on after a token with which "
            "the chat template ends a turn: name it in sampling.stop_token_ids, or set that to null",
        ),
        (
            run(FLAT, length__truncated=0.9, length__past_end=0.4),
            "90% of the answers were cut off at the length limit: raise sampling.max_",
        ),
        (run(FLAT, skipped_steps=0.5), "20 of 40 updates were skipped"),
        (run(FLAT, lr=1e-6), "roughly how far Adam can move a weight, is 4e-05 (gradient norm 0.5)"),
        (run(FLAT, lr=0.0), "roughly how far Adam can move a weight, is 0 (gradient norm 0.5)"),
        (run(FLAT, grad_norm=0.0), "the gradient was 0 in every update"),
    ],
    ids=[
        *("nothing", "failures", "constant", "no variance", "cut off", "no end", "long", "skipped"),
        *("small lr", "no lr", "no gradient"),
    ],
)
def test_each_cause_is_named_and_no_other(rows: Rows, cause: str) -> None:
    _, *causes = verdict(rows, RECIPE)
    assert len(causes) == 1 and cause in causes[0], causes


def test_three_causes_at_most_the_likeliest_first() -> None:
    everything = run(
        [0.0] * 40,
        reward__std=0.0,
        reward__errors=32.0,
        length__truncated=1.0,
        skipped_steps=1.0,
        lr=1e-7,
    )
    failed, constant, cut = verdict(everything, RECIPE)[1:]
    assert "no reward" in failed and "the same reward" in constant and "cut off" in cut
