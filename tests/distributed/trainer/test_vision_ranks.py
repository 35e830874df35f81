"""Models that see, on two real ranks of which one has no image: one launch, a test for each thing checked."""

import json

import pytest

from scripts.tiny_vlm import make_tiny_vlm
from tests.support import vision_checks
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("seeing")
    for kind in vision_checks.KINDS:
        vision_checks.add_head(make_tiny_vlm(folder / kind, architecture=kind, hidden_size=64, vision_size=32))
    file = folder / "found.json"
    run_ranks(vision_checks.two_ranks, 2, timeout=280, arguments=[str(folder), str(file)], images=True)
    return json.loads(file.read_text())


@pytest.mark.parametrize(("kind", "case"), vision_checks.RUNS)
def test_gradients_like_one_process_where_a_rank_has_no_image(found: dict[str, str], kind: str, case: str) -> None:
    """Without the blank image, rank 1 would not enter the encoder's collectives, and rank 0 would wait for it
    (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819). Shared: both have all rows, and a part of their tokens.
    """
    assert found[f"{kind} {case}"] == ""
