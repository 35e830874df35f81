"""The pictures of docs/ are drawn by scripts/pictures.py from records of real runs."""

from pathlib import Path

from scripts import pictures
from tests.conftest import ROOT


def test_all_pictures_are_drawn_from_the_records_and_are_small(tmp_path: Path) -> None:
    pictures.draw(tmp_path)
    drawn, kept = (
        {file.name for file in folder.glob("*.svg")} for folder in (tmp_path, pictures.FOLDER)
    )
    assert drawn == kept
    assert all(file.stat().st_size < 100_000 for file in pictures.FOLDER.iterdir())


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [name for name in pictures.PICTURES if f"pictures/{name}.svg)" not in pages] == []


def test_the_phases_of_a_step_fill_it() -> None:
    for row in pictures.read("step")["steps"]:
        phases = pictures.spans(row)
        assert abs(sum(duration for _, _, duration in phases) - row["time/step"]) < 1e-9
        assert all(begin >= 0 and duration >= 0 for _, begin, duration in phases)
