"""The tests that judge a release of vLLM: every one exists, and the table tells what a report says."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import vllm_tests
from vllm_sources import lay_over
from vllm_tests import CHOSEN, table

from tests.conftest import ROOT

NAMES = [name for tests in CHOSEN.values() for name in tests]


def test_every_named_test_exists_once() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 30
    for name in NAMES:
        file, _, function = name.partition("::")
        defined = [
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert function in defined, name


def test_a_part_fails_by_one_test_and_by_one_that_did_not_run(tmp_path: Path) -> None:
    good = "\n".join(f"PASSED {name}[case with-dashes]" for name in NAMES)
    assert table(good)[1] and len(table(good)[0]) == len(CHOSEN)
    failing, absent = NAMES[0], NAMES[-1]
    report = "\n".join(line for line in good.splitlines() if absent not in line)
    report += (
        f"\nFAILED {failing}[other] - AttributeError: no operator\nSKIPPED [1] tests/engine/a.py:3: why"
    )
    (tmp_path / "report").write_text(report)
    lines, passed = table(report)
    assert (
        not passed and f"failed: {failing}" in lines[0] and f"did not run: {absent}" in "\n".join(lines)
    )
    assert lines[-1] == "skipped in tests/engine/a.py"
    assert vllm_tests.main(str(tmp_path / "report")) == 1


def test_sources_replace_all_but_operators(tmp_path: Path) -> None:
    wheel, site = tmp_path / "vllm-9.0.0.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/new.py", "new")
        archive.writestr("vllm/_C.abi3.so", "for CUDA")
        archive.writestr(
            "vllm-9.0.0.dist-info/METADATA", "Name: vllm\nVersion: 9.0.0\n\nVersion: of a text\n"
        )
    (site / "vllm").mkdir(parents=True)
    (site / "vllm/old.py").write_text("old")
    (site / "vllm/_C.abi3.so").write_text("for CPUs")
    lay_over(wheel, site)
    assert sorted(file.name for file in (site / "vllm").iterdir()) == ["_C.abi3.so", "new.py"]
    assert (site / "vllm/_C.abi3.so").read_text() == "for CPUs"
    metadata = (site / "vllm-9.0.0.dist-info/METADATA").read_text()
    assert metadata == "Name: vllm\nVersion: 9.0.0+cpu\n\nVersion: of a text\n"
    script = [sys.executable, str(ROOT / "scripts/vllm_sources.py"), str(wheel)]
    refused = subprocess.run(script, capture_output=True, text=True)
    if ".venv.vllm-" not in sys.prefix:
        assert refused.returncode == 1 and "only an environment of scripts/try_vllm.sh" in refused.stderr
