"""Every family of models arrives as its checkpoint, from two ranks, some from four, in engines of one and two workers.

Ranks hold the policy under FSDP2 or ZeRO-3, and each also has the model of one engine worker, built and loaded by vLLM
itself. After two syncs, of which the second replays, everything that this model keeps is compared, byte for byte, with
a model that vLLM loads from the checkpoint the policy has saved. Whole engines take ten to fifty seconds each to start:
engine/test_sync.py has them for one rank and one worker, test_collective_ranks.py and test_run.py for two workers.
Other pairs of rank counts and engines follow, since the same is sent from any number of ranks (test_policy.py,
test_hsdp.py, test_deepspeed.py).
"""

import json

import pytest

from scripts.tiny_vlm import make_tiny_vlm
from tests.support import reach_checks
from tests.support.launch import run_ranks
from trainer.commands.tiny_model import make_tiny_model

FAMILIES = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", True),
    ("llama", True),
    ("llama", False),
    ("gemma3", True),
    ("qwen3_moe", False),
    ("deepseek_v2", False),
]
NAMES = [f"{kind}_{'tied' if tied else 'untied'}" for kind, tied in FAMILIES]
MULTIMODAL = [("qwen2_5_vl", True), ("qwen3_vl", False), ("llava", False)]
MULTIMODAL_CASES = ("fsdp 2", "zero3 1")
CASES = {
    2: ("fsdp 1", "fsdp 2", "zero3 1", "zero3 2"),
    4: ("fsdp 1", "fsdp 2", "hsdp 1", "hsdp 2", "experts 2"),
}
"""Number of ranks -> cases: the policy's backend and the engines' tensor-parallel size."""
ON_FOUR_RANKS = ("qwen2_tied", "qwen3_moe_untied", "deepseek_v2_untied")
"""Models that four ranks send: tied and untied weights, experts, and products of weights."""

WITH_ADAPTERS = ("fsdp 1 lora", "fsdp 2 lora", "zero3 1 lora", "zero3 2 lora")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Run all cases on two and on four ranks; failures by number of ranks and name."""
    models = tmp_path_factory.mktemp("models")
    for name, (kind, tied) in zip(NAMES, FAMILIES, strict=True):
        make_tiny_model(models / name, architecture=kind, tied=tied, layers=2)
    results = {}
    for ranks, cases in CASES.items():
        file = tmp_path_factory.mktemp("results") / "found.json"
        folder, adapted = (
            (models, WITH_ADAPTERS) if ranks == 2 else (tmp_path_factory.mktemp("four"), ())
        )
        for name in ON_FOUR_RANKS if ranks == 4 else ():
            (folder / name).symlink_to(models / name)
        run_ranks(
            reach_checks.on_ranks,
            ranks,
            timeout=900,
            arguments=[str(folder), str(file), *cases, *adapted],
        )
        results[ranks] = json.loads(file.read_text())
    return results


@pytest.fixture(scope="module")
def multimodal_failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the cases of multimodal models, whose encoders vLLM loads as well."""
    models, file = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("results") / "found.json"
    for kind, tied in MULTIMODAL:
        make_tiny_vlm(models / f"{kind}_{tied}", architecture=kind, tied=tied)
    run_ranks(
        reach_checks.on_ranks, 2, timeout=400, arguments=[str(models), str(file), *MULTIMODAL_CASES]
    )
    return json.loads(file.read_text())


@pytest.mark.parametrize(("kind", "tied"), MULTIMODAL)
@pytest.mark.parametrize("case", MULTIMODAL_CASES)
def test_multimodal_weights_that_ranks_send_are_those_vllm_loads(
    multimodal_failures: dict[str, str], case: str, kind: str, tied: bool
) -> None:
    assert multimodal_failures[f"{kind}_{tied} {case}"] == ""


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("ranks", "case", "name"),
    [
        (ranks, case, name)
        for ranks, cases in CASES.items()
        for case in cases
        for name in (NAMES if ranks == 2 else ON_FOUR_RANKS)
        if name == reach_checks.SPLIT or "experts" not in case
    ]
    + [(2, case, name) for case in WITH_ADAPTERS for name in reach_checks.ADAPTED],
)
def test_weights_that_ranks_send_or_workers_merge_are_those_vllm_loads(
    failures: dict[int, dict[str, str]], ranks: int, case: str, name: str
) -> None:
    assert failures[ranks][f"{name} {case}"] == ""
