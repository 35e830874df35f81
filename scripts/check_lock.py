"""Checks that a lock holds everything its packages ask for, with their extras: check_lock.py cpu|cuda [--store]

It goes by the metadata of the packages in the environment it runs in, from hotbunk's own requirements onwards. What
`cpu.txt` leaves out on purpose stands in `cpu_left_out.txt` with the reasons. The wheels of `cuda.txt` are not
installed where the tests run, so `--store` keeps what they ask for in `cuda_metadata.json`, except for packages that
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
Asked = tuple[str, Requirement]
"""Who asks (`name` or `name[extra]`), and for what."""


def read_lock(device: str) -> Lock:
    """Package to version, of `cpu` or `cuda`."""
    lines = (FOLDER / f"{device}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): pin for name, pin in pins}


def left_out(device: str) -> dict[str, str]:
    """Packages that the lock leaves out on purpose, and why."""
    file = FOLDER / f"{device}_left_out.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name.strip(): reason.strip() for name, _, reason in (line.partition("#") for line in lines) if name.strip()}


UNLOCKED = {"openenv", "reasoning-gym", "textarena", "trackers"}
"""Extras for libraries that users install if they want them."""


def own_requirements(device: str) -> list[str]:
    """Requirements of pyproject.toml on this device, with every extra except the other device's and `UNLOCKED`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    others = {{"cpu": "cuda", "cuda": "cpu"}[device], *UNLOCKED}
    return [*project["dependencies"], *(line for name, asked in extras.items() if name not in others for line in asked)]


def installed(name: str, pinned: str) -> list[str]:
    """Requirements of a package of this environment.

    Raises:
        LookupError: it is not installed, or in another version.
    """
    try:
        found = version(name)
    except PackageNotFoundError:
        raise LookupError(f"{name} {pinned} is not installed") from None
    if found.partition("+")[0] != pinned:
        raise LookupError(f"{name} {pinned} is locked, but {found} is installed")
    return requires(name) or []


def stored_or_installed(name: str, pinned: str) -> list[str]:
    """Requirements of a package of the CUDA lock: as stored, otherwise as `installed`."""
    kept: dict[str, list[str]] = json.loads(METADATA.read_text())
    asked = kept.get(f"{name}=={pinned}")
    return installed(name, pinned) if asked is None else asked


PYTHONS = ("3.11", "3.12", "3.13")
"""The releases of Python that a lock is for. Requirements of a wheel that differ by release say so in their markers."""


def asked_for(
    lock: Lock, own: list[str], metadata: Callable[[str, str], list[str]], python: str | None = None
) -> Iterator[Asked]:
    """All that hotbunk and the packages of the lock ask for, each extra that is asked for included.

    `python`: under that release, such as "3.12"; None: under this one.
    """
    release = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    todo = [("hotbunk", "", Requirement(line)) for line in own]
    todo += [(name, "", Requirement(line)) for name, pinned in lock.items() for line in metadata(name, pinned)]
    reached: set[tuple[str, str]] = set()
    while todo:
        name, extra, asked = todo.pop()
        if asked.marker is not None:
            wanted_by = [asked.marker.evaluate(release | {"extra": name}) for name in (extra, "")]
            if not wanted_by[0] or (extra and wanted_by[1]):
                continue
        elif extra:
            continue
        yield f"{name}[{extra}]" if extra else name, asked
        wanted = canonicalize_name(asked.name)
        for further in asked.extras if wanted in lock else ():
            if (wanted, further) not in reached:
                reached.add((wanted, further))
                todo += [(wanted, further, Requirement(line)) for line in metadata(wanted, lock[wanted])]


def problems(
    device: str, lock: Lock, metadata: Callable[[str, str], list[str]], python: str | None = None
) -> list[str]:
    """A sentence for everything that is asked for, and neither in the lock in a version that fits nor left out."""
    excepted, used, found = left_out(device), set(), []
    for who, asked in asked_for(lock, own_requirements(device), metadata, python):
        if (device, who) == ("cpu", "torch"):  # installed first, with whatever its build asks for
            continue
        name = canonicalize_name(asked.name)
        if name not in lock and name in excepted:
            used.add(name)
        elif name not in lock:
            found.append(f"{who} asks for {name}{asked.specifier}, which {device}.txt lacks")
        elif not SpecifierSet(_release(asked.specifier)).contains(lock[name], prereleases=True):
            found.append(f"{who} asks for {name}{asked.specifier}, but {device}.txt has {lock[name]}")
    found += [f"{device}_left_out.txt names {name}, which nothing asks for" for name in sorted(excepted.keys() - used)]
    return sorted(set(found))


def store(lock: Lock) -> None:
    """Write `cuda_metadata.json` from this environment: what is asked for here, by name and extra."""
    same = read_lock("cpu").items()
    kept: dict[str, list[str]] = {f"{name}=={pin}": [] for name, pin in lock.items() if (name, pin) not in same}
    for who, asked in asked_for(lock, own_requirements("cuda"), installed):
        name, _, extra = who.rstrip("]").partition("[")
        asked.marker = None
        line = str(asked) + (f'; extra == "{extra}"' if extra else "")
        if f"{name}=={lock.get(name)}" in kept:
            kept[f"{name}=={lock[name]}"].append(line)
    METADATA.write_text(json.dumps({name: sorted(set(lines)) for name, lines in sorted(kept.items())}, indent=0) + "\n")


def lacking(name: str, device: str) -> list[str]:
    """Requirements of an installed package that this environment does not meet, and the lock does not leave out."""
    asked = [Requirement(line) for line in requires(name) or []]
    needed = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [
        f"{each.name}{_release(each.specifier)}"
        for each in needed
        if canonicalize_name(each.name) not in left_out(device) and not _met(each)
    ]


def _met(asked: Requirement) -> bool:
    try:
        return SpecifierSet(_release(asked.specifier)).contains(version(asked.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _release(specifier: SpecifierSet) -> str:
    """Without local versions: +cpu is a build of the same release."""
    return re.sub(r"\+\w+", "", str(specifier))


def main(device: str, *options: str) -> int:
    """Print what is wrong with the lock of a device, by this environment's metadata; 1 if anything is.

    Instead, with `--lacking PACKAGE`, what that package asks for and this environment has not.
    """
    if options[:1] == ("--lacking",):
        for line in lacking(options[1], device):
            print(line)
        return 0
    lock = read_lock(device)
    if "--store" in options:
        store(lock)
    found = problems(device, lock, installed)
    print("\n".join(found) or f"{device}.txt: {len(lock)} packages, and everything that they ask for")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
