"""The reference pages of docs/ are what scripts/reference.py writes from the code."""

from difflib import unified_diff

import pytest

from scripts import reference
from tests.conftest import ROOT


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_reference_page_is_current(page: str) -> None:
    """Pages equal what the code gives; if not, run `.venv/bin/python scripts/reference.py`."""
    written, expected = (
        (ROOT / "docs" / page).read_text().splitlines(),
        reference.PAGES[page]().splitlines(),
    )
    assert list(unified_diff(written, expected, "on disk", "from the code", n=0, lineterm="")) == []


def test_a_page_that_is_not_current_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(reference.PAGES, "python.md", lambda: "changed")
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    before = (ROOT / "docs/python.md").read_text()
    assert reference.main() == 1 and (ROOT / "docs/python.md").read_text() == before
    assert (
        capsys.readouterr().err
        == "docs/python.md is not current: run .venv/bin/python scripts/reference.py\n"
    )
