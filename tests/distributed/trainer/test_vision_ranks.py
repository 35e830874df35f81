"""Multimodal models on two real ranks, launched once, of which one has no image."""

from pathlib import Path

import pytest

from scripts.tiny_vlm import make_tiny_vlm
from tests.support import vision_checks
from tests.support.rank_checks import Failures, failures_of


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    folder = tmp_path_factory.mktemp("multimodal")
    for kind in vision_checks.KINDS:
        vision_checks.add_head(
            make_tiny_vlm(folder / kind, architecture=kind, hidden_size=64, vision_size=32)
        )
    return failures_of(vision_checks.two_ranks, 2, folder)


@pytest.mark.parametrize("what", vision_checks.two_ranks(Path()))
def test_gradients_are_those_of_one_process_if_a_rank_has_no_image(
    two_ranks: Failures, what: str
) -> None:
    """Without the blank image, rank 1 would not enter the encoder's collectives, and rank 0 would wait for it
    (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819). In shared cases both ranks have all rows, and a part of
    the tokens.
    """
    assert two_ranks[what] == ""
