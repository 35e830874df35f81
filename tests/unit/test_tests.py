"""The order of the tests: a module's tests are found by name or in tests/README.md, and their names are short
enough.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
README = (TESTS / "README.md").read_text("utf-8")
LONG = 180
"""Lines of a module above which it has tests of its own, or a row of the table."""


def listed() -> dict[str, str]:
    """Maps each module in the table of modules tested elsewhere to the second cell of its row."""
    descriptions = {}
    for row in README.partition("## Modules that are tested elsewhere")[2].splitlines():
        if len(cells := row.strip("|").split("|")) == 2:
            folder = ""
            for name in re.findall(r"`([^`]+\.py)`", cells[0]):
                folder = name.rpartition("/")[0] if "/" in name else folder
                descriptions[name if "/" in name else f"{folder}/{name}"] = cells[1]
    return descriptions


def modules() -> list[str]:
    files = [
        file
        for package in ("trainer", "generation", "sharding")
        for file in (ROOT / package).rglob("*.py")
    ]
    return [
        str(file.relative_to(ROOT)) for file in files if len(file.read_text("utf-8").splitlines()) > LONG
    ]


def test_a_long_module_has_tests_of_its_name_or_a_row_in_the_table() -> None:
    names = {file.name for file in TESTS.rglob("test_*.py")}
    untold = [
        name for name in modules() if f"test_{Path(name).stem}.py" not in names and name not in listed()
    ]
    assert not untold


def test_rows_of_the_table_name_modules_and_tests_that_are_there() -> None:
    for module, tests in listed().items():
        assert (ROOT / module).is_file(), module
        named = re.findall(r"`([^`]+?)/?`", tests)
        assert named, module
        for name in named:
            there = (TESTS / name).exists() or any(TESTS.rglob(name.rpartition("/")[2]))
            assert there, f"{module}: {name}"


def test_no_name_of_a_test_is_longer_than_80_characters() -> None:
    names = [
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    ]
    assert not [name for name in names if len(name) > 80]


@pytest.mark.parametrize(
    "folder", ["unit", "engine", "distributed", "gpu", "softgpu", "cuda_lock", "support"]
)
def test_folders_of_the_table_exist(folder: str) -> None:
    assert f"| `{folder}/` |" in README and (TESTS / folder).is_dir()
