"""Compare LoRA policies on two real ranks, launched once, with PEFT in one process."""

from pathlib import Path

import pytest

from tests.support import lora_checks
from tests.support import policy_checks as checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> Failures:
    return failures_of(lora_checks.two_ranks, 2, models)


@pytest.fixture(scope="module", params=[1, 2])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """Runs on one and two ranks go on from an adapter."""
    folder = tmp_path_factory.mktemp("models")
    checks.make_model("qwen2", checks.model_folder(folder), True)
    return failures_of(lora_checks.starts, request.param, folder)


@pytest.mark.parametrize("what", lora_checks.starts(Path()))
def test_a_run_goes_on_from_pefts_adapter_and_from_its_own(started: Failures, what: str) -> None:
    assert started[what] == ""


@pytest.mark.parametrize("what", lora_checks.two_ranks(Path()))
def test_two_steps_are_those_of_peft_and_are_trained_further_by_another_backend(
    two_ranks: Failures, what: str
) -> None:
    assert two_ranks[what] == ""
