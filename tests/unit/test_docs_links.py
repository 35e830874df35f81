"""README, its neighbours and docs/: every link, anchor, path, command, flag and key that they name exists."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from trainer import TrainConfig
from trainer.cli import parse
from trainer.config.recipe import REFUSED
from trainer.config.suggestions import counterparts

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "trainer|generation|sharding|scripts|tests|docs"
SECTIONS = "|".join(TrainConfig.model_fields)
KEYS = {
    f"{section}.{key}"
    for section, field in TrainConfig.model_fields.items()
    for key in field.annotation.model_fields
}
MISTAKES = {"policy.learning_rate", *REFUSED}  # quoted from the sentences that refuse them
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Return a page's anchors as GitHub makes them from headings: lower case, no punctuation, hyphens for spaces."""
    seen, slugs = Counter[str](), set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        slugs.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return slugs


def missing(page: Path, target: str) -> str:
    """Return the target if it does not resolve from the page, else nothing."""
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    present = file.exists() and (not anchor or anchor in anchors(file))
    return "" if present else target


@pages
def test_every_internal_link_and_its_anchor_resolve(page: Path) -> None:
    """Links keep up with headings that are renamed and pages that are moved."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    assert not [
        lost for target in targets if not target.startswith("http") and (lost := missing(page, target))
    ]


@pages
def test_every_path_into_the_repository_exists(page: Path) -> None:
    """Paths of sources, scripts, recipes and tests exist, in prose and in commands."""
    paths = re.findall(
        rf"(?<![\w./])((?:{FOLDERS})/[\w./-]*\w/?)", re.sub(r"https?://\S+", "", page.read_text())
    )
    assert not [path for path in paths if not (ROOT / path).exists()]


@pages
def test_every_key_of_a_recipe_is_known(page: Path) -> None:
    """Keys exist, in prose, in flags (section.key), and in recipes."""
    text = "" if page.name == "python.md" else page.read_text()  # whose dots are those of attributes
    used = set(re.findall(rf"(?<![\w./])((?:{SECTIONS})\.[a-z_]+)\b(?!\(|\.\w)", text))
    used -= {name for name in used if name.endswith((".py", ".md", ".png", ".json", ".jsonl"))}
    for language, block in FENCE.findall(text):
        recipe = yaml.safe_load(block) if language == "yaml" else {}
        used |= {f"{section}.{key}" for section in recipe for key in recipe[section]}
    peers = set(counterparts()) if page.name == "migration.md" else set()
    assert used - KEYS - peers <= MISTAKES


@pages
def test_every_command_and_its_flags_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every `hotbunk COMMAND --flag` exists, in prose and in code."""

    def help_of(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            parse([*arguments, "--help"])
        return capsys.readouterr().out

    commands = set(re.findall(r"^    (\w+) ", help_of(), re.MULTILINE))
    for command, rest in re.findall(
        r"(?:`|bin/|python -m )(?:hotbunk|trainer) ([a-z]+)\b([^`\n#]*)", page.read_text()
    ):
        assert command in commands
        flags = [flag for flag in re.findall(r"--([\w-]+)(?![\w.-])", rest) if flag != "resume"]
        assert not [flag for flag in flags if f"--{flag}" not in help_of(command)]


def test_every_page_that_a_source_names_exists() -> None:
    """Comments and docstrings link to pages and their anchors."""
    for folder in FOLDERS.split("|")[:5]:
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in (".py", ".sh", ".yaml"):
                for target in re.findall(r"\b(docs/[\w-]+\.md(?:#[\w-]+)?)", source.read_text()):
                    assert not missing(ROOT / "README.md", target), source


@pages
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """Name of tests exist, by which `-k` finds them."""
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert not sorted(named - set(re.findall(r"def (test_\w+)\(", tests)))


def test_the_readme_is_two_screens() -> None:
    """The README has at most 1200 words; longer explanations belong on pages in docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 1200
