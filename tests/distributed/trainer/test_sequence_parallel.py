"""Ranks that share sequences, each with a part of the tokens, compared with plain Transformers in one process."""

import json
from pathlib import Path

import pytest

from tests.support import critic_checks, sequence_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks

BY_KIND = pytest.mark.parametrize(("kind", "tied"), checks.KINDS)


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    critic_checks.make_reward_model(models, "qwen2")
    run_ranks(
        sequence_checks.two_ranks, 2, timeout=280, arguments=[str(models), str(models / "two.json")]
    )
    return json.loads((models / "two.json").read_text())


@pytest.fixture(scope="module")
def four_ranks(models: Path) -> dict[str, str]:
    """Return the errors of each check on four ranks."""
    run_ranks(
        sequence_checks.four_ranks, 4, timeout=280, arguments=[str(models), str(models / "four.json")]
    )
    return json.loads((models / "four.json").read_text())


@BY_KIND
def test_two_ranks_compute_the_log_probabilities_of_one(
    two_ranks: dict[str, str], kind: str, tied: bool
) -> None:
    """Return the models have sliding windows, norms of queries, tied heads, experts or latent attention."""
    assert two_ranks[f"scores {kind} {tied}"] == ""


@BY_KIND
def test_two_ranks_compute_the_loss_and_gradients_of_one(
    two_ranks: dict[str, str], kind: str, tied: bool
) -> None:
    assert two_ranks[f"update {kind} {tied}"] == ""


@pytest.mark.parametrize("budget", sequence_checks.BUDGETS)
def test_a_sequence_above_the_budget_has_a_micro_batch_of_its_own(
    two_ranks: dict[str, str], budget: int
) -> None:
    assert two_ranks[f"update {budget}"] == ""


@pytest.mark.parametrize("layers", ["every_second", "full"])
def test_recomputed_layers_exchange_again(two_ranks: dict[str, str], layers: str) -> None:
    assert two_ranks[f"recomputed {layers}"] == ""


def test_two_ranks_keep_at_most_six_tenths_of_what_one_keeps_for_backward(
    two_ranks: dict[str, str],
) -> None:
    """scripts/bench/long_sequences.py measures peak memory at 32k tokens."""
    assert two_ranks["memory"] == ""


def test_given_routes_of_a_mixture_are_split_like_its_tokens(two_ranks: dict[str, str]) -> None:
    assert two_ranks["routes"] == ""


@pytest.mark.parametrize("what", ["critic", "shared trunk"])
def test_critics_share_sequences_as_well(two_ranks: dict[str, str], what: str) -> None:
    assert two_ranks[what] == ""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_steps_under_zero_are_those_of_one_process(two_ranks: dict[str, str], stage: int) -> None:
    assert two_ranks[f"zero {stage}"] == ""


@pytest.mark.parametrize("backend", ["fsdp", "zero 3"])
def test_adapters_learn_as_in_one_process(two_ranks: dict[str, str], backend: str) -> None:
    assert two_ranks[f"lora {backend}"] == ""


def test_supervised_steps_are_those_of_ranks_that_share_nothing(two_ranks: dict[str, str]) -> None:
    assert two_ranks["sft"] == ""


def test_a_checkpoint_resumes_on_ranks_that_share_nothing(two_ranks: dict[str, str]) -> None:
    assert two_ranks["alone again"] == ""


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_two_pairs_and_a_group_of_four_compute_the_gradients_of_one(
    four_ranks: dict[str, str], kind: str, ways: int
) -> None:
    """Four ranks are more than the two heads of keys and values, which are repeated."""
    assert four_ranks[f"update {kind} {ways}"] == ""


def test_four_ranks_compute_the_log_probabilities_of_one(four_ranks: dict[str, str]) -> None:
    assert four_ranks["scores 4"] == ""


def test_pairs_share_sequences_within_replicas_of_the_model(four_ranks: dict[str, str]) -> None:
    assert four_ranks["replicas"] == ""


@pytest.mark.parametrize("ways", [2, 4])
def test_ranks_without_tokens_join_every_exchange(four_ranks: dict[str, str], ways: int) -> None:
    assert four_ranks[f"idle {ways}"] == ""
