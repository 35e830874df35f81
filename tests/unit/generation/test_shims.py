"""torchvision beside a torch for CPUs, in our processes and in those of engines, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from generation import shims
from tests.conftest import ROOT

TELL = "import torchvision; from torchvision.transforms import v2; print(torchvision.__file__, torchvision.ops.nms)"
"""A program that uses torchvision; it ends with an error where the operators are missing."""

unfit = pytest.mark.skipif(not shims.are_needed(), reason="torchvision fits the installed torch")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that has inherited nothing of this process's."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=surroundings | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@unfit
def test_programs_that_do_not_import_this_project_are_left_as_they_are() -> None:
    assert "operator torchvision::nms does not exist" in python(TELL).stderr


@unfit
@pytest.mark.parametrize("package", ["generation", "sharding", "trainer", "hotbunk"])
def test_a_process_of_this_project_can_import_torchvision(package: str) -> None:
    done = python(f"import {package}; {package}.__doc__; import generation; {TELL}")
    assert done.returncode == 0, done.stderr
    assert "site-packages/torchvision/__init__.py" in done.stdout


@unfit
def test_a_plain_process_with_an_engines_environment_can_import_torchvision() -> None:
    done = python(TELL, **shims.python_path())
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout.replace(sys.prefix, "")


@unfit
def test_packages_load_neither_torch_nor_torchvision() -> None:
    code = "import sys, trainer, sharding, generation; print({'torch', 'torchvision', 'transformers'} & {*sys.modules})"
    assert python(code).stdout == "set()\n"


@pytest.mark.parametrize(
    ("torch", "torchvision", "needed"),
    [
        ("None", "0.28.0+cu130", True),
        ("None", "0.28.0+cpu", False),
        ("None", "0.28.0a0+8fb8771", False),
        ("'13.0'", "0.28.0+cu130", False),
        ("None", None, False),
    ],
)
def test_only_a_torchvision_for_cuda_beside_a_torch_for_cpus_needs_it(
    torch: str, torchvision: str | None, needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {torch}\n")
    if torchvision is not None:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "version.py").write_text(f"__version__ = '{torchvision}'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert shims.are_needed() is needed
    assert bool(shims.python_path()) is needed


def test_an_engines_python_path_keeps_what_was_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "are_needed", lambda: True)
    monkeypatch.setenv("PYTHONPATH", "/mine:/yours")
    assert shims.python_path()["PYTHONPATH"].split(":")[1:] == ["/mine", "/yours"]
