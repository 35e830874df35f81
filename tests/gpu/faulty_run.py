"""Run in which CUDA fails: each ends in a sentence that names phase and device, or goes on, and leave nothing behind.

    python -m tests.gpu.faulty_run [NAME ...]           in the environment of tests/softgpu/environment.sh
    … -m tests.gpu.faulty_run KIND N STEP PHASE WHO train RECIPE …              one rank of such a run

In the latter, on rank 0, the N-th call of a KIND (those of SOFTGPU_FAULT, or kill) fails, counted from where a phase of
a step begins, in WHO: the trainer, or the engine's worker.
"""

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.real_run import MACHINE_FIGURES

RECIPE = (
    "scripts/recipes/arithmetic.yaml --run.name softgpu_fault --checkpoint.resume none --run.steps 2 --eval.every 0 "
    "--batch.prompts_per_step 4 --run.step_deadline_s 900 --run.first_step_deadline_s 900 --engine.start_timeout_s 900 "
    # Of float32 MKL's last bit depends on what is decoded together
    "--sync.timeout_s 300 --policy.dtype bfloat16"
)
WORKER = r"phase sending weights failed on rank 0: SyncError: the worker on [-0-9a-f]+ failed: AcceleratorError"
PHASE, DEVICE = "phase [a-z0-9 >]+", r"(on cuda:0: |GPU 0|the worker on [-0-9a-f]+ failed)"
FULL = rf"{PHASE}(?=.*{DEVICE}).*[Oo]ut of memory"
LOST = "on cuda:0: CUDA error: unspecified launch failure"
# Name: ranks, arguments, and what the launcher's last lines have; empty: the run goes on to its end.
RUNS: dict[str, tuple[int, str, str]] = {
    "straight": (1, "malloc 0 2 rollout trainer", ""),
    "handle": (1, "open 1 1 sync engine", f"{WORKER}.*mapping of buffer object failed"),
    "lost in update": (1, "lost 5 2 update trainer", f"in phase step 2 > update {LOST}"),
    "lost in sync": (1, "lost 1 2 sync trainer", f"in phase step 2 > generation shift {LOST}"),
    "lost in sync, engine": (1, "lost 1 2 sync engine", f"{WORKER}.*unspecified launch failure"),
    "lost in rollout": (1, "lost 5 2 rollout engine", ""),
    "full in update": (
        1,
        "malloc 1 2 update trainer",
        "in phase step 2 > update on cuda:0: CUDA out of memory",
    ),
    "killed": (2, "kill 1 2 rollout trainer", "rank 0: was ended by SIGKILL"),
}
straight: dict[str, list[dict[str, float]]] = {}
"""The figures of the run that nothing happens to."""


def arm(kind: str, number: int) -> None:
    """From now on the `number`-th call of this kind fails in this process."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    ctypes.CDLL("libcuda.so.1").sg_arm(kind.encode(), ctypes.c_long(number))


def rank(kind: str, number: str, step: str, place: str, who: str, *words: str) -> int:
    """hotbunk's command line, with a fault. Return the exit code."""
    from sharding.manager import ShardingManager
    from trainer import cli
    from trainer.run import processes
    from trainer.run.watchdog import Watchdog

    managers: list[Any] = []  # empty again once it has struck
    watchdogs: list[Any] = []
    connections: list[Any] = []
    phase, sync, connect = Watchdog.phase, ShardingManager._sync, ShardingManager.connect

    def strike(now: str) -> None:
        if now != place or not managers or f"step {step}" not in watchdogs[0].current_phase():
            return
        leader = managers.pop()._leader  # once
        if who == "trainer":
            arm(kind, int(number))
        else:
            call = leader.engine.ask_workers(
                "softgpu", "tests.gpu.faulty_run", f"arm({kind!r}, {number})"
            )
            leader.thread.run(call, 60, "arming")

    def watched_phase(self: Any, name: str, *arguments: Any) -> Any:
        watchdogs[:] = [self]
        strike(name)
        return phase(self, name, *arguments)

    def watched_sync(self: Any, *arguments: Any) -> None:
        strike("sync")
        sync(self, *arguments)

    def watched_connect(self: Any, *arguments: Any) -> None:
        connect(self, *arguments)
        if os.environ.get("RANK") == "0" and not connections:  # later ones are those of a restart
            managers.append(self)
        connections.append(self)

    Watchdog.phase, ShardingManager._sync, ShardingManager.connect = (
        watched_phase,
        watched_sync,
        watched_connect,
    )  # type: ignore
    processes.put_current_folder_last()
    return cli.main(list(words))


def run(name: str, ranks: int, module: list[str], wanted: str, fault: str = "") -> bool:
    """Start a run, and return True if it ended as it should; after a `fault` that follows its start it may go on."""
    words = f"{RECIPE} --sync.way {'pull' if name == 'killed' else 'staged'}".split()
    command = [
        sys.executable,
        "-m",
        "trainer.launcher",
        "--nproc-per-node",
        str(ranks),
        "-m",
        *module,
        "train",
        *words,
    ]
    environment = os.environ | ({"SOFTGPU_FAULT": fault} if fault else {})
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    last = [line for line in done.stderr.splitlines() if line.startswith("[hotbunk]   ")]
    left = subprocess.run(
        ["pgrep", "-f", "softgpu_fault"], capture_output=True, text=True, check=False
    ).stdout.split()
    ended = (
        done.returncode != 0 and re.search(wanted, " ".join(last)) if wanted else done.returncode == 0
    )
    if not wanted or (fault and done.returncode == 0):
        # the first of these is the one that nothing happens to
        rows = map(json.loads, Path("runs/softgpu_fault/metrics.jsonl").read_text().splitlines())
        figures = [{key: row[key] for key in row if not key.startswith(MACHINE_FIGURES)} for row in rows]
        first = straight.setdefault("figures", figures)
        unlike = {
            key
            for row, other in zip(figures, first, strict=False)
            for key in row
            if row[key] != other.get(key)
        }
        ended = done.returncode == 0 and figures == first
        last += ["unlike: " + ", ".join(sorted(unlike))] if unlike else []
    fine, message = bool(ended and not left), " ".join(last)[:500]
    print(
        f"{name}: {'ok' if fine else 'FAILED'}: exit {done.returncode}: {message} {left or ''}",
        flush=True,
    )
    if not fine:
        print(done.stderr[-3000:], flush=True)
    return fine


def starts(count: int = 30) -> bool:
    """Out of memory at drawn allocations of a start, of either process."""
    draw, fine = random.Random(0), run("start", 1, ["trainer"], "")
    for number in range(count):
        part, most = draw.choice([("trainer train", 12), ("EngineCor", 20)])
        fault = f"malloc:{draw.randint(1, most)}:{part}"
        fine &= run(f"start {number} {fault}", 1, ["trainer"], FULL, fault)
    return fine


def shift(count: int = 100) -> bool:
    """Out of memory at each of the first allocations of a shift, of the trainer and of the worker."""
    from tests.gpu.late_shifts import Shifts
    from trainer.distributed import init_process_group
    from trainer.run import processes

    processes.start_guardian()
    init_process_group(300, "cuda")
    shifts, fine = Shifts("staged", shifts=0), True
    for who in ("trainer", "worker"):
        for number in range(1, count + 1):
            shifts.outcome(0)
            arm("malloc", number) if who == "trainer" else shifts.in_worker(
                f"ctypes.CDLL('libcuda.so.1').sg_arm(b'malloc', {number})"
            )
            try:
                shifts.outcome(1)
                print(f"{who}: a shift has {number - 1} allocations", flush=True)
                arm("malloc", 0)
                break
            except Exception as error:
                text = " ".join(f"{type(error).__name__}: {error}".split())
                named = bool(re.search(FULL, text))
                fine &= named
                print(
                    f"{who}, allocation {number}: {'ok' if named else 'FAILED'}: {text[:300]}",
                    flush=True,
                )
            try:
                shifts.trial.manager.sleep()
                shifts.outcome(0)
                print("  went on", flush=True)
            except Exception as error:
                print(f"  anew, as {str(error)[:150]}", flush=True)
                shifts.resources.close()
                shifts = Shifts("staged", shifts=0)
    return fine


def main(names: list[str]) -> int:
    """Return the exit code."""
    fine = True
    for name, (ranks, words, wanted) in RUNS.items():
        if not names or name in names:
            fine &= run(name, ranks, ["tests.gpu.faulty_run", *words.split()], wanted)
    for name, several in (("starts", starts), ("shift", shift)):
        if not names or name in names:
            fine &= several()
    return int(not fine)


if __name__ == "__main__":
    sys.exit(rank(*sys.argv[1:]) if "train" in sys.argv else main(sys.argv[1:]))
