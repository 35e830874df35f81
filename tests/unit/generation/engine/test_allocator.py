"""Settings of torch's allocator: expandable segments in a trainer, plain ones within a block."""

import re
from collections.abc import Iterator

import pytest
import torch

from generation.engine.allocator import (
    ALLOCATOR_VARIABLES,
    plain_segments,
    use_expandable_segments,
    without_expandable_segments,
)


def settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the allocator, in the environment or in torch; those of this process are restored."""
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    before = settings()
    torch._C._accelerator_setAllocatorSettings("")
    yield
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("expandable_segments:True", ""),
        (" expandable_segments : true ", ""),
        ("expandable_segments:False", ""),
        ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        (
            "expandable_segments:True,roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.8",
        ),
        ("max_split_size_mb:128, pinned_use_background_threads:True", None),
        ("", None),
    ],
)
def test_only_this_option_leaves_the_settings(given: str, expected: str | None) -> None:
    assert without_expandable_segments(given) == (given if expected is None else expected)


def test_segments_are_expandable_outside_of_blocks_and_other_options_stay() -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
    use_expandable_segments()
    assert settings() == "max_split_size_mb:128,expandable_segments:True"
    with pytest.raises(ZeroDivisionError), plain_segments():
        assert settings() == "max_split_size_mb:128,expandable_segments:False"
        with plain_segments():
            assert settings() == "max_split_size_mb:128,expandable_segments:False"
        _ = 1 / 0
    assert settings() == "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_a_user_who_sets_the_option_decides(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "expandable_segments:False")
    use_expandable_segments()
    assert not re.search("expandable_segments:True", settings())


def test_a_block_changes_nothing_where_all_segments_are_plain() -> None:
    with plain_segments():
        assert settings() == ""
    assert settings() == ""
