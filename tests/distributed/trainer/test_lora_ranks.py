"""Compare LoRA policies on two real ranks, launched once, with PEFT in one process."""

import json

import pytest

from tests.support import lora_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    folder = tmp_path_factory.mktemp("models")
    for kind, tied in [("qwen2", True), ("llama", False)]:
        checks.make_model(kind, checks.model_folder(folder, kind, tied), tied)
    run_ranks(lora_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module", params=[1, 2])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the errors of runs on one and two ranks that go on from an adapter."""
    folder = tmp_path_factory.mktemp("models")
    checks.make_model("qwen2", checks.model_folder(folder), True)
    arguments = [str(folder), str(folder / "found.json")]
    run_ranks(lora_checks.start_on_ranks, request.param, timeout=280, arguments=arguments)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("backend", ["fsdp", "zero 2", "zero 3"])
def test_a_run_goes_on_from_pefts_adapter_and_from_its_own(
    started: dict[str, str], backend: str
) -> None:
    assert started[backend] == ""


@pytest.mark.parametrize("what", [*lora_checks.BACKENDS, "untied"])
def test_two_steps_are_those_of_peft_in_one_process(failures: dict[str, str], what: str) -> None:
    assert failures[f"steps {what}"] == ""


@pytest.mark.parametrize("backend", ["fsdp", "zero 2"])
def test_adapters_are_trained_further_by_another_backend_and_open_in_peft(
    failures: dict[str, str], backend: str
) -> None:
    assert failures[f"files {backend}"] == ""
