"""Start the ranks of `hotbunk train` and `hotbunk sft` on this machine.

The process checks the recipe, then becomes the launcher of the ranks (`trainer/launcher.py`), or
the supervisor above the launcher (`trainer/run/supervisor.py`).
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generation import guardian
from trainer.errors import UserError, quoted
from trainer.surroundings import put_in_order, require_loopback

RANKS = """\
A rank is started for each GPU of this machine, or on CPU one rank; NPROC_PER_NODE sets
another number. On several nodes, give the command on each of them with NNODES,
NODE_RANK (0 on the first), MASTER_ADDR (the first node's address on a trusted network)
and, where port 29500 is taken, MASTER_PORT. With RESTARTS=N a run that fails is started
again, up to N times, from its newest checkpoint."""
"""The environment variables that `launch` reads, for the commands' help."""

_WITHOUT_RANKS = {"-h", "--help", "--dry-run", "--check"}


def launch(argv: Sequence[str]) -> None:
    """Replace this process with the launcher of the ranks; `argv` is `train` or `sft` with its
    arguments.

    A mistake in the recipe ends the process with the exit code of the check. The function returns
    only if an option is answered without ranks (`--help`, `--dry-run`, `--check`). It has then set
    WORLD_SIZE and LOCAL_WORLD_SIZE to the numbers of ranks that a run would have. Raises UserError
    if one of the environment variables is wrong.
    """
    if forgotten := put_in_order():
        print(f"[hotbunk] {forgotten}", file=sys.stderr)
    _require_own_packages()
    for name in [name for name in os.environ if name.startswith("PET_")]:
        # Options of torchrun, set for another launcher than the one that this process becomes.
        del os.environ[name]
    count = _number("NPROC_PER_NODE", 1, 1024)
    nodes = _number("NNODES", 1, 100000)
    restarts = _number("RESTARTS", 0, 1000000)
    ranks = count if os.environ.get("NPROC_PER_NODE") else max(1, _count_gpus())
    # Keeps Python from importing a package `trainer`, `generation` or `sharding` that happens to be
    # in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    _set_default("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // ranks))
    if _WITHOUT_RANKS.intersection(argv):
        os.environ |= {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        return
    require_loopback()
    rendezvous = _rendezvous(nodes) if nodes > 1 else []
    _check(argv, nodes * ranks, ranks)
    # torchrun kills ranks that have not ended so many seconds after SIGTERM. Ranks end themselves
    # soon after checkpoint.grace_s, so torchrun has to wait longer. Older versions of torchrun have
    # the environment variable, but not the option.
    _set_default("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 600)
    launcher = ["trainer.run.supervisor", str(restarts)] if restarts else ["trainer.launcher"]
    per_node = ["--nproc-per-node", str(ranks)]
    os.execv(
        sys.executable, [sys.executable, "-m", *launcher, *rendezvous, *per_node, "-m", "trainer", *argv]
    )


def _require_own_packages() -> None:
    """Raise UserError if PYTHONPATH names a folder with a package `trainer`, `generation` or
    `sharding` that Python would import instead of ours.
    """
    own = Path(__file__).resolve().parents[2]
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(entry).resolve()
        if folder == own:
            return
        for package in ("trainer", "generation", "sharding"):
            if (folder / package / "__init__.py").is_file():
                remedy = f"take {entry} out of PYTHONPATH, or rename that package"
                raise UserError(
                    f"{folder / package} hides Hotbunk's package {package} by PYTHONPATH: {remedy}"
                )


def _check(argv: Sequence[str], ranks: int, neighbours: int) -> None:
    """Check the recipe in another process, so that a mistake is reported once, and not by every
    rank. If the check fails, end this process with its exit code.

    SIGHUP, SIGINT and SIGTERM end the check and this process.
    """

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, leave)
    here = os.getpid()

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends it through this process
        guardian.die_with(here)

    command = [sys.executable, "-m", "trainer", *argv, "--check"]
    environment = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(neighbours)}
    with subprocess.Popen(command, env=environment, preexec_fn=begin) as check:
        try:
            code = check.wait()
        finally:
            check.kill()
    if code:
        sys.exit(code if code > 0 else 128 - code)


def _rendezvous(nodes: int) -> list[str]:
    """Return the launcher's options for a run on several nodes."""
    node = _number("NODE_RANK", 0, nodes - 1)
    port = _number("MASTER_PORT", 1, 65535, 29500)
    address = os.environ.get("MASTER_ADDR")
    if not address or not os.environ.get("NODE_RANK"):
        raise UserError(f"with NNODES={nodes}, NODE_RANK and MASTER_ADDR must be set, too.")
    first = ["--master-addr", address, "--master-port", str(port)]
    return ["--nnodes", str(nodes), "--node-rank", str(node), *first]


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    """Return the whole number in an environment variable, or `default` (without one: `least`) if it
    is unset or empty. Raises UserError if it is not in `least`..`most`.
    """
    text = os.environ.get(name) or str(least if default is None else default)
    if not re.fullmatch("0|[1-9][0-9]{0,6}", text) or not least <= int(text) <= most:
        raise UserError(f"{name} is {quoted(text)}: give it as a whole number from {least} to {most}.")
    return int(text)


def _set_default(name: str, value: int) -> None:
    """Set an environment variable to `value` if it is unset or empty."""
    os.environ[name] = os.environ.get(name) or str(value)


def _count_gpus() -> int:
    """Count the entries of CUDA_VISIBLE_DEVICES or, where that is unset, the GPUs that nvidia-smi
    lists.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in re.split("[,\n]", visible) if name])
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
