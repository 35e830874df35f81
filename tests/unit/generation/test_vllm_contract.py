"""What Hotbunk relies on in vLLM, compared with a release's sources: the locked one, and one that is made up."""

import json
import os
import shutil
from pathlib import Path

import pytest
import vllm_contract
from vllm_contract import RECORD, Tree, changed, differences, installed_folder

from tests.conftest import has_cpu_build

RECORDED = json.loads(RECORD.read_text("utf-8"))


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Return a folder with links to the sources of the installed release."""

    def without_sources(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if not n.endswith(".py") and not os.path.isdir(os.path.join(folder, n))]

    source = installed_folder() / "vllm"
    shutil.copytree(source, tmp_path / "vllm", copy_function=os.symlink, ignore=without_sources)
    return tmp_path


def rewrite(folder: Path, file: str, old: str, new: str) -> None:
    """Replace a text in a file, which is a link until then."""
    path = folder / file
    text = path.read_text("utf-8")
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new), "utf-8")


@pytest.mark.skipif(not has_cpu_build(), reason="the record is of the locked release's build for CPUs")
def test_the_locked_release_is_the_recorded_one() -> None:
    assert differences(installed_folder(), RECORDED) == []
    signatures = [form for spots in RECORDED["signatures"].values() for form in spots.values()]
    assert all(signatures)


def test_everything_that_the_product_replaces_in_vllm_is_recorded() -> None:
    recorded = {spot for spots in RECORDED["signatures"].values() for spot in spots}
    assert changed().keys() <= recorded


def test_a_release_that_differs_in_three_places_is_judged_in_three_sentences(made_up: Path) -> None:
    """A name has moved, a signature has another parameter, and a text is worded differently."""
    rewrite(
        made_up,
        "vllm/v1/metrics/loggers.py",
        "class StatLoggerBase(",
        "from vllm.v1.metrics.base import StatLoggerBase_ as _\n\n\nclass Base_(",
    )
    (made_up / "vllm/v1/metrics/base.py").write_text("class StatLoggerBase:\n    pass\n")
    rewrite(
        made_up,
        "vllm/model_executor/models/config.py",
        "Chunked prefill is required",
        "Cut prompts are needed",
    )
    rewrite(
        made_up,
        "vllm/v1/engine/async_llm.py",
        "async def reset_encoder_cache(self",
        "async def reset_encoder_cache(self, soon",
    )
    sentences = differences(made_up, RECORDED)
    moved = [line for line in sentences if "StatLoggerBase" in line]
    others = [line for line in sentences if line not in moved]
    assert "name vllm.v1.metrics.loggers.StatLoggerBase is moved to vllm.v1.metrics.base" in moved[0]
    assert moved[0].endswith("used by generation/engine/vllm_compat.py")
    assert len(others) == 2
    assert others[0] == (
        "signature of vllm.v1.engine.async_llm:AsyncLLM.reset_encoder_cache: was async (self), is async (self, soon); "
        "used by generation/engine/engine.py"
    )
    assert others[1] == (
        "text 'Chunked prefill is required' no longer stands in vllm/model_executor/models/config.py; "
        "used by generation/engine/vllm_differences.py"
    )


def test_of_two_forms_of_a_name_a_release_needs_one(made_up: Path, tmp_path: Path) -> None:
    """The arguments of vLLM's server are where 0.33 has them."""
    (made_up / "vllm/entrypoints/common").mkdir(exist_ok=True)
    launchers = made_up / "vllm/entrypoints/launchers/cli_args.py"
    shutil.move(launchers, made_up / "vllm/entrypoints/common/cli_args.py")
    assert differences(made_up, RECORDED) == []


def test_a_signature_is_found_where_it_is_inherited_or_imported_from(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .base import Base as Shown\n")
    (package / "base.py").write_text(
        "class Root:\n    def run(self, x=1): ...\n\n\nclass Base(Root): ...\n"
    )
    tree = Tree(tmp_path)
    assert tree.signature("vllm", "Shown.run") == "(self, x=1)"
    assert tree.signature("vllm", "Shown.walk") is None
    assert vllm_contract.names(tmp_path) == {}
