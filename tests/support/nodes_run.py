"""Train over several machines, simulated by namespaces on this one, while a machine dies or its link is cut.

    python tests/support/nodes_run.py FOLDER [--nodes 4] [--only power cut long-cut slow first]

Needs root. Each node is one rank with one engine, started by `RESTARTS=… bash scripts/train.sh` as on real machines. A
tiny model is trained once on as many ranks of this machine, and once on the nodes, where something happens every other
step. Both runs must end alike, bit for bit.

    power     the last node loses power, and its command is given again 10 s later
    cut       its link drops everything for 5 s
    long-cut  its link drops everything for 40 s
    slow      its link has 100 Mbit/s from then on
    first     the first node, which has the store, loses power; all end, and the same command is given again on all
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from tests.support.killed_run import unequal  # noqa: E402
from tests.support.nodes import Nodes, missing  # noqa: E402
from tests.support.real_run import MACHINE_FIGURES, START_SECONDS, Run, write_recipe  # noqa: E402
from trainer.run.records import read_rows  # noqa: E402


class NodesRun:
    """One run on nodes, with a shared folder; `log(node)` has a node's output."""

    def __init__(self, nodes: Nodes, recipe: Path, name: str, restarts: int) -> None:
        self.nodes, self.recipe, self.name, self.restarts = nodes, recipe, name, restarts
        self.folder = recipe.parent / "runs" / name
        self.launched: dict[int, subprocess.Popen[bytes]] = {}
        for node in range(nodes.count):
            self.start(node)

    def log(self, node: int) -> Path:
        """Return the file with a node's output."""
        return self.recipe.parent / f"{self.name}-node{node}.log"

    def ends(self, node: int) -> int:
        """Return the number of attempts that have failed on a node."""
        return self.log(node).read_text().count("failed in step")

    def start(self, node: int) -> None:
        """Give the command that a user gives on a node."""
        environment = {
            name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ
        }
        environment |= {
            "RESTARTS": str(self.restarts),
            "NNODES": str(self.nodes.count),
            "NODE_RANK": str(node),
            "MASTER_ADDR": Nodes.address(0),
            "NPROC_PER_NODE": "1",
            "HOTBUNK_TEST_RUN": uuid.uuid4().hex,  # reward functions of tests read it
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = ["bash", str(ROOT / "scripts/train.sh"), str(self.recipe), "--run.name", self.name]
        self.launched[node] = self.nodes.start(node, command, self.log(node), environment)

    def output(self) -> str:
        return "".join(
            f"--- node {node}\n{self.log(node).read_text()}" for node in range(self.nodes.count)
        )

    def comparable_rows(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        rows = read_rows(file) if file.exists() else []
        return [{k: v for k, v in row.items() if not k.startswith(MACHINE_FIGURES)} for row in rows]

    def wait_for_steps(self, count: int, seconds: float = START_SECONDS) -> None:
        """Wait until metrics.jsonl has `count` steps."""
        deadline = time.monotonic() + seconds
        while len(self.comparable_rows()) < count:
            ended = [node for node, process in self.launched.items() if process.poll() is not None]
            assert not ended, f"node {ended[0]} ended before step {count}:\n{self.output()}"
            assert time.monotonic() < deadline, (
                f"no step {count} within {seconds:.0f} s:\n{self.output()}"
            )
            time.sleep(0.05)

    def wait(self, seconds: float = START_SECONDS) -> list[int]:
        """Wait for the end, and return the nodes' exit codes."""
        deadline = time.monotonic() + seconds
        try:
            return [
                p.wait(max(0.1, deadline - time.monotonic())) for _, p in sorted(self.launched.items())
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the nodes did not end within {seconds:.0f} s:\n{self.output()}"
            ) from None

    def lose_power(self, node: int) -> None:
        """End the node without closing a connection."""
        self.nodes.cut(node)
        self.nodes.kill(node)
        self.launched.pop(node).wait()

    def come_back(self, node: int) -> None:
        """Boots the node, and gives its command again."""
        self.nodes.boot(node)
        self.start(node)

    def happen(self, event: str) -> None:
        """Causes one of the events that the module describes."""
        last = self.nodes.count - 1
        match event:
            case "power":
                self.lose_power(last)
                time.sleep(10)
                self.come_back(last)
            case "cut" | "long-cut":
                self.nodes.cut(last)
                time.sleep(5 if event == "cut" else 40)
                self.nodes.mend(last)
            case "slow":
                self.nodes.slow(last, 100)
            case "first":
                before = [self.ends(node) for node in range(self.nodes.count)]
                self.lose_power(0)
                began, survivors = time.monotonic(), dict(self.launched)
                while any(self.ends(node) == before[node] for node in survivors):
                    assert time.monotonic() < began + 60, f"not all ended within 60 s:\n{self.output()}"
                    time.sleep(0.1)
                print(f"all have ended {time.monotonic() - began:.0f} s after", flush=True)
                self.come_back(0)


EVENTS = ("power", "cut", "long-cut", "slow", "first")


def main(arguments: list[str] | None = None) -> int:
    """Train undisturbed and on nodes, and print what the two runs differ in."""
    from trainer.commands.tiny_model import make_tiny_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=EVENTS, default=EVENTS)
    options = parser.parse_args(arguments)
    if why := missing():
        raise SystemExit(f"this machine cannot simulate several: {why}")
    options.folder.mkdir(parents=True)  # fails if it exists: a run in it would be resumed
    model = make_tiny_model(options.folder / "model", layers=2, intermediate_size=128)
    steps = 2 + 2 * len(options.only)
    recipe = nodes_recipe(options.folder, model, steps)
    straight = Run(recipe, ranks=options.nodes, name="straight", preloaded=True)
    assert straight.wait(1200) == 0, straight.output()
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as private,
        Nodes(options.nodes, Path(private), options.folder.resolve(), ROOT) as nodes,
    ):
        run = NodesRun(nodes, recipe, "nodes", restarts=10)
        for number, event in enumerate(options.only):
            run.wait_for_steps(1 + 2 * number, 1200)
            print(f"after step {len(run.comparable_rows())}: {event}", flush=True)
            run.happen(event)
        codes = run.wait(1200)
        left = [line for node in range(options.nodes) for line in nodes.processes(node)]
    for node in range(options.nodes):
        lines = [line for line in run.log(node).read_text().splitlines() if line.startswith("[hotbunk]")]
        print(f"node {node}:", *lines, sep="\n  ")
    problems = [f"exit codes {codes}"] * any(codes) + left + unequal(straight, run)
    print("\n".join(problems) or f"equal, bit for bit: {steps} steps on {options.nodes} nodes")
    return min(len(problems), 1)


def nodes_recipe(folder: Path, model: Path, steps: int) -> Path:
    """Write the recipe of a run that saves after each step, and learns something in each."""
    return write_recipe(
        folder,
        model,
        run={"steps": steps, "step_deadline_s": 600, "first_step_deadline_s": 600},
        checkpoint={"every": 1, "keep": 2},
        eval={"every": 0},
        engine={"load_format": "dummy"},
        policy={"lr": 1e-4},
    )


if __name__ == "__main__":
    sys.exit(main())
