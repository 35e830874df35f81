"""Multimodal models on two real ranks, launched once, of which one has no image."""

import json

import pytest

from scripts.tiny_vlm import make_tiny_vlm
from tests.support import vision_checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the errors of each check on two ranks."""
    folder = tmp_path_factory.mktemp("multimodal")
    for kind in vision_checks.KINDS:
        vision_checks.add_head(
            make_tiny_vlm(folder / kind, architecture=kind, hidden_size=64, vision_size=32)
        )
    file = folder / "found.json"
    run_ranks(vision_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(file)])
    return json.loads(file.read_text())


@pytest.mark.parametrize(("kind", "case"), vision_checks.RUNS)
def test_gradients_are_those_of_one_process_if_a_rank_has_no_image(
    failures: dict[str, str], kind: str, case: str
) -> None:
    """Without the blank image, rank 1 would not enter the encoder's collectives, and rank 0 would wait for it
    (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819). In shared cases both ranks have all rows, and a part of
    the tokens.
    """
    assert failures[f"{kind} {case}"] == ""
