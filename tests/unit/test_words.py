"""Words that stop a reader are few, and become no more: `python -m tests.support.words` lists them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import words

MOST_FRAGMENTS = 30
MOST_TWINS = 0
MOST_UNDOCUMENTED = 0
MOST_OVERSIZED = 0


@pytest.mark.parametrize(
    ("finder", "most"),
    [
        (words.fragments, MOST_FRAGMENTS),
        (words.twins, MOST_TWINS),
        (words.undocumented, MOST_UNDOCUMENTED),
        (words.oversized, MOST_OVERSIZED),
    ],
)
def test_the_product_has_at_most_the_permitted_number_of_each_finding(
    finder: Callable[[], list[str]], most: int
) -> None:
    lines = finder()
    assert len(lines) <= most, "\n".join(lines)


def test_contributing_lists_every_word_that_the_finders_report() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2]
    assert all(f"*{opening}*" in text for opening in words.FRAGMENTS)


SAMPLE = '''
"""Whether it rains."""

Rows = list[int]


class Twin:
    """Of two."""

    def long(self, own: int) -> None:
        for each in (1, 2):
            print(each)
        told, count = own, 2
        print(told)
        print(count)


def documented() -> None:
    """Whatever opens with a longer word is not a fragment."""
'''


def test_finders_report_every_kind_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(SAMPLE)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert words.fragments(("one.py",)) == ["one.py:1: Whether it rains.", "one.py:7: Of two."]
    monkeypatch.setattr(words, "MOST_FUNCTION_LINES", 2)
    monkeypatch.setattr(words, "MOST_FILE_LINES", 20)
    assert words.oversized(("one.py",)) == ["one.py:10: long"]
    monkeypatch.setattr(words, "MOST_FILE_LINES", 10)
    assert words.oversized(("one.py",)) == ["one.py:1: file", "one.py:10: long"]
    assert words.undocumented(("one.py",)) == ["one.py:10: long"]
    assert words.twins((".",)) == ["Rows: one.py, two.py", "Twin: one.py, two.py"]
    assert not words.twins(("one.py",))
