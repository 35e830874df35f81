"""Checks that a lock has all packages that its packages and their extras require: check_lock.py cpu|cuda [--store]

It starts with hotbunk's requirements, and reads the metadata of the packages in its environment. Packages that
`cpu.txt` leaves out on purpose are listed in `cpu_left_out.txt`, with the reasons. The wheels of `cuda.txt` are not
installed where the tests run, so `--store` writes their requirements to `cuda_metadata.json`, except for packages that
`cpu.txt` has in the same version.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts/requirements"
METADATA = FOLDER / "cuda_metadata.json"

Lock = dict[str, str]
Dependency = tuple[str, Requirement]
"""The package with the requirement (`name` or `name[extra]`), and the requirement."""


def read_lock(device: str) -> Lock:
    """Return the lock of `cpu` or `cuda`, as package to version."""
    lines = (FOLDER / f"{device}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): pin for name, pin in pins}


def left_out(device: str) -> dict[str, str]:
    """Return the packages that a lock leaves out on purpose, and the reasons."""
    file = FOLDER / f"{device}_left_out.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {
        name.strip(): reason.strip()
        for name, _, reason in (line.partition("#") for line in lines)
        if name.strip()
    }


UNLOCKED = {"openenv", "reasoning-gym", "textarena", "trackers"}
"""Extras with optional libraries, which no lock has."""


def own_requirements(device: str) -> list[str]:
    """Return the requirements of pyproject.toml, with all extras except the other device's and `UNLOCKED`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    excluded = {{"cpu": "cuda", "cuda": "cpu"}[device], *UNLOCKED}
    return [
        *project["dependencies"],
        *(line for name in extras if name not in excluded for line in extras[name]),
    ]


def installed(name: str, pinned: str) -> list[str]:
    """Return the requirements of a package in this environment.

    Raises:
        LookupError: the package is not installed, or in another version.
    """
    try:
        release = version(name)
    except PackageNotFoundError:
        raise LookupError(f"{name} {pinned} is not installed") from None
    if release.partition("+")[0] != pinned:
        raise LookupError(f"{name} {pinned} is locked, but {release} is installed")
    return requires(name) or []


def stored_or_installed(name: str, pinned: str) -> list[str]:
    """Return the requirements of a package of the CUDA lock, as they are stored or, otherwise, as `installed`."""
    stored: dict[str, list[str]] = json.loads(METADATA.read_text())
    lines = stored.get(f"{name}=={pinned}")
    return installed(name, pinned) if lines is None else lines


PYTHONS = ("3.11", "3.12", "3.13")
"""The releases of Python that a lock is for. A wheel's requirements may differ by release through their markers."""


def asked_for(
    lock: Lock,
    requirements: list[str],
    metadata: Callable[[str, str], list[str]],
    python: str | None = None,
) -> Iterator[Dependency]:
    """Yield the requirements of hotbunk and of the packages of the lock, including those of extras that are required.

    `python` is the release that markers are evaluated for, such as "3.12"; None: that of this environment.
    """
    release = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    todo = [("hotbunk", "", Requirement(line)) for line in requirements]
    todo += [
        (name, "", Requirement(line)) for name, pinned in lock.items() for line in metadata(name, pinned)
    ]
    reached: set[tuple[str, str]] = set()
    while todo:
        name, extra, requirement = todo.pop()
        if requirement.marker is not None:
            with_extra, without = (
                requirement.marker.evaluate(release | {"extra": value}) for value in (extra, "")
            )
            if not with_extra or (extra and without):
                continue
        elif extra:
            continue
        yield f"{name}[{extra}]" if extra else name, requirement
        package = canonicalize_name(requirement.name)
        for further in requirement.extras if package in lock else ():
            if (package, further) not in reached:
                reached.add((package, further))
                todo += [
                    (package, further, Requirement(line)) for line in metadata(package, lock[package])
                ]


def problems(
    device: str, lock: Lock, metadata: Callable[[str, str], list[str]], python: str | None = None
) -> list[str]:
    """Return a sentence for each requirement that is neither met by the lock nor left out on purpose."""
    excepted, used, sentences = left_out(device), set(), []
    for package, requirement in asked_for(lock, own_requirements(device), metadata, python):
        if (device, package) == ("cpu", "torch"):  # installed first, with all that its build requires
            continue
        name = canonicalize_name(requirement.name)
        if name not in lock and name in excepted:
            used.add(name)
        elif name not in lock:
            sentences.append(
                f"{package} requires {name}{requirement.specifier}, which {device}.txt lacks"
            )
        elif not SpecifierSet(_release(requirement.specifier)).contains(lock[name], prereleases=True):
            sentences.append(
                f"{package} requires {name}{requirement.specifier}, but {device}.txt has {lock[name]}"
            )
    unused = sorted(excepted.keys() - used)
    sentences += [f"{device}_left_out.txt names {name}, which no package requires" for name in unused]
    return sorted(set(sentences))


def store(lock: Lock) -> None:
    """Write `cuda_metadata.json` from this environment: the requirements by name and extra."""
    same = read_lock("cpu").items()
    stored: dict[str, list[str]] = {
        f"{name}=={pin}": [] for name, pin in lock.items() if (name, pin) not in same
    }
    for package, requirement in asked_for(lock, own_requirements("cuda"), installed):
        name, _, extra = package.rstrip("]").partition("[")
        requirement.marker = None
        line = str(requirement) + (f'; extra == "{extra}"' if extra else "")
        if f"{name}=={lock.get(name)}" in stored:
            stored[f"{name}=={lock[name]}"].append(line)
    metadata = {name: sorted(set(lines)) for name, lines in sorted(stored.items())}
    METADATA.write_text(json.dumps(metadata, indent=0) + "\n")


def lacking(name: str, device: str) -> list[str]:
    """Return the requirements of an installed package that are neither met here nor left out by the lock."""
    requirements = [Requirement(line) for line in requires(name) or []]
    needed = [
        line for line in requirements if line.marker is None or line.marker.evaluate({"extra": ""})
    ]
    return [
        f"{requirement.name}{_release(requirement.specifier)}"
        for requirement in needed
        if canonicalize_name(requirement.name) not in left_out(device) and not _met(requirement)
    ]


def _met(requirement: Requirement) -> bool:
    try:
        return SpecifierSet(_release(requirement.specifier)).contains(
            version(requirement.name), prereleases=True
        )
    except PackageNotFoundError:
        return False


def _release(specifier: SpecifierSet) -> str:
    """Return a specifier without local versions: +cpu is a build of the same release."""
    return re.sub(r"\+\w+", "", str(specifier))


def main(device: str, *options: str) -> int:
    """Print the mistakes in the lock of a device, by this environment's metadata. Return 1 if there are any.

    With `--lacking PACKAGE`, prints that package's requirements that this environment lacks, instead.
    """
    if options[:1] == ("--lacking",):
        for line in lacking(options[1], device):
            print(line)
        return 0
    lock = read_lock(device)
    if "--store" in options:
        store(lock)
    sentences = problems(device, lock, installed)
    print(
        "\n".join(sentences) or f"{device}.txt: {len(lock)} packages, and everything that they require"
    )
    return bool(sentences)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
