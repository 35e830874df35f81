"""The reference pages of docs/ are what scripts/reference.py writes from the code."""

import pytest

from scripts import reference
from tests.conftest import ROOT


def test_the_reference_pages_are_current() -> None:
    """Otherwise run `.venv/bin/python scripts/reference.py`."""
    assert reference.stale_pages() == []


def test_a_page_that_is_not_current_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(reference.PAGES, "python.md", lambda: "changed")
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    before = (ROOT / "docs/python.md").read_text()
    assert reference.main() == 1 and (ROOT / "docs/python.md").read_text() == before
    assert capsys.readouterr().err == "docs/python.md is not current: run .venv/bin/python scripts/reference.py\n"
