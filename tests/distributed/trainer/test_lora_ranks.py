"""LoRA policies on two real ranks against PEFT in one process: one launch, a test for each thing checked."""

import json

import pytest

from tests.support import lora_checks
from tests.support import policy_checks as checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for kind, tied in [("qwen2", True), ("llama", False)]:
        checks.make_model(kind, checks.model_folder(folder, kind, tied), tied)
    run_ranks(lora_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("what", [*lora_checks.BACKENDS, "untied"])
def test_two_steps_like_peft_in_one_process(found: dict[str, str], what: str) -> None:
    assert found[f"steps {what}"] == ""


@pytest.mark.parametrize("backend", ["fsdp", "zero 2"])
def test_adapters_go_on_under_another_backend_and_open_in_peft(found: dict[str, str], backend: str) -> None:
    assert found[f"files {backend}"] == ""
