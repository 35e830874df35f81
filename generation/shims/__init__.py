"""Let torchvision be imported beside a torch for CPUs, in this project's processes and in those of
its engines alone.

`install` puts this folder before all others on `sys.path`, and `python_path` into the environment
of an engine: vLLM looks at a model's class in a plain Python process, where none of this project's
code is loaded. Programs that do not import this project are left as they are.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _declared(package: str, name: str) -> str:
    """Return the line of a package's version.py that assigns `name`, without importing it; "" if
    there is none.
    """
    for folder in sys.path:
        try:
            with open(os.path.join(folder or ".", package, "version.py"), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        return next((line for line in lines if line.startswith(name)), "")
    return ""


def are_needed() -> bool:
    """Return True if torch was built for CPUs and torchvision for CUDA, by their version files."""
    torch_is_for_cpus = _declared("torch", "cuda").endswith("= None")
    return torch_is_for_cpus and "+cu" in _declared("torchvision", "__version__")


def install() -> None:
    """Let this process, and those that `multiprocessing` spawns from it, import torchvision where
    it could not.
    """
    if _FOLDER not in sys.path and "torchvision" not in sys.modules and are_needed():
        sys.path.insert(0, _FOLDER)


def python_path() -> dict[str, str]:
    """Return PYTHONPATH for processes of an engine, as an environment; empty where nothing has to
    be done.
    """
    if not are_needed():
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([_FOLDER, inherited] if inherited else [_FOLDER])}
