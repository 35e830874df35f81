"""The figures that benchmarks compute from their measurements."""

import re
from pathlib import Path

import common
import pytest
import shift
import torch


def cycles(memory: list[int]) -> list[shift.Cycle]:
    return [shift.Cycle({}, {"engine on": nbytes}) for nbytes in memory]


def test_a_leak_is_growth_a_cycle_and_not_memory_kept_once() -> None:
    assert shift.growth(
        cycles([100 + 7 * number for number in range(11)]), "engine on"
    ) == pytest.approx(7)
    assert shift.growth(cycles([0, 900, 1000, 1000, 1000, 1000, 1000, 1000]), "engine on") == 0
    assert shift.growth(cycles([5, 6, 7]), "engine on") == 0  # too few to say


def test_actions_take_turns_and_the_first_round_does_not_count() -> None:
    called: list[str] = []
    times = common.in_turns(
        {name: lambda name=name: called.append(name) for name in "ab"},
        rounds=2,
        device=torch.device("cpu"),
    )
    assert called == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_a_copy_in_pieces_copies_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "COPIED_AT_ONCE", 100)
    copied: list[int] = []
    original = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other: copied.append(len(other)) or original(self, other)
    )
    common.plain_copy(250, torch.device("cpu"))()
    assert copied == [100, 100, 50]


def test_ways_are_drawn_over_the_bytes_they_moved(tmp_path: Path) -> None:
    import weight_sync

    sizes = [
        {
            "nbytes": nbytes,
            "ways": {name: {"seconds": [nbytes / 1e9]} for name in ("memcpy", "sync", "TRL")},
        }
        for nbytes in (10**6, 10**8)
    ]
    weight_sync.plot(sizes, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_rows_on_the_page_are_those_of_the_table() -> None:
    """Each figure's commit on docs/benchmarks.md is that of a row of the CSV, which table.py finds by its words."""
    import table

    page = (table.ROWS.parent / "benchmarks.md").read_text().partition("\n## ")[0]
    commits = re.findall(r"\b[0-9a-f]{7}\b", page)
    assert len(re.findall(r"^\| .* \|$", page, re.MULTILINE)) == 1 + 12
    assert all(table.matching([commit]) for commit in commits)
    assert len(table.matching([])) > 30
    assert table.main(["no such words"]) == 1
