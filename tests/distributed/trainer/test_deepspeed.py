"""Compare DeepSpeedPolicy, ZeRO-1 to 3, with plain steps and FsdpPolicy on two real ranks, launched once."""

import json

import pytest

from tests.support import deepspeed_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks

STAGES = pytest.mark.parametrize("stage", deepspeed_checks.STAGES)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the errors of each check on two ranks, and their output."""
    folder = checks.make_models(tmp_path_factory.mktemp("models"))
    output = run_ranks(
        deepspeed_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(folder / "found.json")]
    )
    return json.loads((folder / "found.json").read_text()) | {"output": output}


@pytest.mark.parametrize(
    "backend",
    [
        "fsdp",
        "hsdp, whole on every rank",
        "zero 1",
        "zero 2",
        "zero 3",
        "zero 3, experts",
        "zero 3, offloaded",
    ],
)
def test_three_steps_are_those_of_one_process(failures: dict[str, str], backend: str) -> None:
    """Losses, gradients and weights are equal; test_hsdp.py has four ranks."""
    assert failures[f"steps {backend}"] == ""


def test_given_routes_and_balance_are_those_of_one_process(failures: dict[str, str]) -> None:
    assert failures["routed"] == ""


def test_steps_print_no_deprecation_warnings(failures: dict[str, str]) -> None:
    assert "is deprecated" not in failures["output"]


@STAGES
def test_nan_on_one_rank_skips_the_update_on_all(failures: dict[str, str], stage: int) -> None:
    assert failures[f"nan {stage}"] == ""


@STAGES
def test_checkpoints_go_from_fsdp_to_zero_and_back(failures: dict[str, str], stage: int) -> None:
    assert failures[f"checkpoint {stage}"] == ""


@STAGES
def test_offloading_between_updates_changes_no_update(failures: dict[str, str], stage: int) -> None:
    assert failures[f"shifts {stage}"] == ""


@pytest.mark.parametrize("weights", ["whole", "cut"])
def test_export_opens_in_plain_transformers(failures: dict[str, str], weights: str) -> None:
    assert failures[f"export {weights}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_in_bfloat16_changes_no_update(failures: dict[str, str], stage: int) -> None:
    assert failures[f"shifts in bfloat16 {stage}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_in_the_compute_dtype_is_read_once(failures: dict[str, str], stage: int) -> None:
    assert failures[f"read once {stage}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_at_1e_6_moves_the_master_weights(failures: dict[str, str], stage: int) -> None:
    assert failures[f"small steps {stage}"] == ""


@pytest.mark.parametrize("weights", ["whole", *(f"cut {kind} {tied}" for kind, tied in checks.KINDS)])
def test_the_engine_is_sent_the_checkpoints_weights(failures: dict[str, str], weights: str) -> None:
    """Return weights are sent from ZeRO-1, where every rank has all of them, and from ZeRO-3."""
    assert failures[f"sent {weights}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_the_memory_that_the_plan_says(failures: dict[str, str], stage: int) -> None:
    assert failures[f"memory {stage}"] == ""
