"""The wheel: what is in it, and that its commands need nothing else of the repository."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("generation", "hotbunk", "sharding", "trainer")
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy of the source, since setuptools leaves files there."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "tests/support", *BUILD_FILES):
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "..", "."]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder / "source", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("hotbunk-*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_all_files_of_the_packages_and_no_others(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files == source
    assert {f"{package}/py.typed" for package in PACKAGES} < files
    assert {"trainer/commands/report_page.html", "trainer/commands/report_page.js"} < files


def test_the_wheels_metadata_names_command_licence_and_addresses(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(f"{folder}/entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {"hotbunk": "hotbunk.__main__:main"}
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (
        metadata["License-Expression"] == "Apache-2.0"
        and f"{folder}/licenses/LICENSE" in wheel.namelist()
    )
    assert [line.partition(",")[0] for line in metadata.get_all("Project-URL", [])] == [
        "Repository",
        "Documentation",
        "Changelog",
        "Issues",
    ]


def test_commands_of_an_installed_wheel_find_schema_and_templates(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """The wheel is unpacked outside the repository, and is imported before an installed clone."""
    wheel.extractall(tmp_path / "site")
    (tmp_path / "here").mkdir()

    def hotbunk(*words: str) -> str:
        code = "import sys, runpy, trainer; print(trainer.__file__); runpy.run_module('hotbunk', run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path / "here",
            env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        file, _, output = done.stdout.partition("\n")
        assert file == str(tmp_path / "site/trainer/__init__.py")
        return output

    assert '"CheckpointConfig"' in hotbunk("schema")
    hotbunk("new", "mine", "--model", "name")
    assert {file.name for file in (tmp_path / "here/mine").iterdir()} == {
        "recipe.yaml",
        "reward.py",
        "data.jsonl",
    }
    assert hotbunk("train", "--help").startswith("usage: hotbunk train")
