"""Run a function on several real torchrun ranks from a test.

    run_ranks(function, nproc=2, timeout=60, arguments=[str(tmp_path)])

The function lives in an importable file, takes strings, and joins the process group itself; whatever fails on a rank
fails the test with every rank's output, and so does a rank that has not come to the function's end. What such a test
checks it therefore asserts on the ranks. As a script, this file is what the ranks run.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from trainer import lifetime

ROOT = Path(__file__).resolve().parents[2]
_DONE = "HOTBUNK_TEST_DONE"  # the folder in which each rank leaves its number at its end


def run_ranks(
    target: Callable[..., Any] | Path,
    nproc: int,
    timeout: float = 120.0,
    arguments: list[str] | None = None,
    lost: tuple[int, ...] = (),
) -> str:
    """Run a function or a script on `nproc` ranks; returns what they printed, stdout and stderr together.

    `lost` are ranks that leave in the middle of the function, for a test of what the others make of it.

    Raises AssertionError with the output when a rank fails, or when `timeout` seconds have passed; then every process
    is killed first.
    """
    if isinstance(target, Path):
        command = [str(target), *(arguments or [])]
    else:
        command = [__file__, inspect.getfile(target), target.__qualname__, *(arguments or [])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as done:
        output = _launch(launcher, environment | {_DONE: done}, timeout)
        ended = sorted(int(file.name) for file in Path(done).iterdir())
    expected = [rank for rank in range(nproc) if rank not in lost]
    assert isinstance(target, Path) or ended == expected, f"only ranks {ended} came to the end:\n{output}"
    return output


def _launch(launcher: list[str], environment: dict[str, str], timeout: float) -> str:
    process = subprocess.Popen(
        launcher, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_tree(process)
        output, _ = process.communicate()
        raise AssertionError(f"{launcher} took longer than {timeout} s:\n{output}") from None
    finally:
        _kill_tree(process)
    assert process.returncode == 0, f"{launcher} exited with {process.returncode}:\n{output}"
    return output


def leave() -> NoReturn:
    """The end of a function whose process group is broken, and would hold up its process."""
    _note_end()
    os._exit(0)


def _note_end() -> None:
    (Path(os.environ[_DONE]) / os.environ["RANK"]).touch()


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """torchrun gives each rank a session of its own, so killing the launcher's process group would not reach them."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid)
    for member in [*family.children(recursive=True), family]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


def _main(file: str, function: str, *arguments: str) -> int:
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    getattr(module, function)(*arguments)
    _note_end()
    return 0


if __name__ == "__main__":
    # A rank leaves as the command line's ranks do: the interpreter's own shutdown now and then aborts in the destructor
    # of a gloo group that a device mesh still holds ("terminate called without an active exception").
    lifetime.run(lambda: _main(*sys.argv[1:]))
