"""The files that an adopter looks for agree with the scripts and with one another."""

import re
import tomllib

import pytest
import yaml

from hotbunk import __version__
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASES = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]


def test_pre_commit_runs_what_the_test_script_lints_with() -> None:
    script = (ROOT / "scripts/test.sh").read_text()
    linters = re.findall(r"^(\.venv/bin/.+?)(?: \|\| status=1| &)$", script, re.MULTILINE)
    assert len(linters) == 4 and not any("pytest" in line for line in linters)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == linters


def test_the_workflow_runs_the_test_command_on_every_release_of_python() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert (
        commands == ["bash scripts/test.sh"] and f"\n{commands[0]} " in (ROOT / "README.md").read_text()
    )
    assert job["strategy"]["matrix"]["python"] == RELEASES
    assert (
        f"{', '.join(RELEASES[:-1])} or {RELEASES[-1]} is needed"
        in (ROOT / "scripts/setup.sh").read_text()
    )


def test_there_is_one_version_and_one_address() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert all(url.startswith(citation["repository-code"]) for url in PROJECT["urls"].values())


@pytest.mark.parametrize("name", ["Documentation", "Changelog"])
def test_addresses_lead_to_paths_of_the_repository(name: str) -> None:
    assert (ROOT / re.split("/(?:tree|blob)/main/", PROJECT["urls"][name])[1]).exists()


def test_the_image_has_no_more_files_than_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    missing = [
        line for line in (path.strip("/") for path in ignored) if not {line, f"**/{line}"} & {*left_out}
    ]
    assert missing in ([], [".venv", ".venv.*"]) and ".venv*" in left_out and ".git" in left_out
