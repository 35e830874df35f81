"""DeepSpeedPolicy, ZeRO-1 to 3, against FsdpPolicy on two real ranks: one launch, a test for each thing checked."""

import json

import pytest

from tests.support import deepspeed_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks

STAGES = pytest.mark.parametrize("stage", deepspeed_checks.STAGES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = checks.make_models(tmp_path_factory.mktemp("models"))
    said = run_ranks(deepspeed_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text()) | {"said": said}


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
def test_three_steps_like_one_process(found: dict[str, str], backend: str) -> None:
    """Losses, gradients and weights. On four ranks: test_hsdp.py."""
    assert found[f"steps {backend}"] == ""


def test_given_routes_and_balance_are_those_of_one_process(found: dict[str, str]) -> None:
    assert found["routed"] == ""


def test_names_that_torch_has_changed_are_not_spoken_of_in_every_step(found: dict[str, str]) -> None:
    assert "is deprecated" not in found["said"]


@STAGES
def test_nan_on_one_rank_skips_on_all(found: dict[str, str], stage: int) -> None:
    assert found[f"nan {stage}"] == ""


@STAGES
def test_checkpoints_go_from_fsdp_to_zero_and_back(found: dict[str, str], stage: int) -> None:
    assert found[f"checkpoint {stage}"] == ""


@STAGES
def test_memory_put_away_between_updates_changes_none(found: dict[str, str], stage: int) -> None:
    assert found[f"shifts {stage}"] == ""


@pytest.mark.parametrize("weights", ["whole", "cut"])
def test_export_opens_in_plain_transformers(found: dict[str, str], weights: str) -> None:
    assert found[f"export {weights}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_put_away_in_bfloat16_changes_none(found: dict[str, str], stage: int) -> None:
    assert found[f"shifts in bfloat16 {stage}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_in_the_compute_dtype_is_read_once(found: dict[str, str], stage: int) -> None:
    assert found[f"read once {stage}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_at_1e_6_moves_the_masters(found: dict[str, str], stage: int) -> None:
    assert found[f"small steps {stage}"] == ""


@pytest.mark.parametrize("weights", ["whole", *(f"cut {kind} {tied}" for kind, tied in checks.KINDS)])
def test_the_engine_is_sent_the_checkpoint(found: dict[str, str], weights: str) -> None:
    """From ZeRO-1, where every rank has all of it, and from ZeRO-3."""
    assert found[f"sent {weights}"] == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_what_the_plan_says(found: dict[str, str], stage: int) -> None:
    assert found[f"memory {stage}"] == ""
