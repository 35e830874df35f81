"""Kill programs that use engines as a library, at random moments, and looks for what they leave behind.

    python -m tests.support.killed_programs MODEL [--kinds KIND ...] [--kills 10] [--seed 0]

A program is killed by SIGKILL some time after one of the events that it passes: its start, the first process of an
engine, the engine's readiness, its use. Ten seconds later no process, no shared memory and no socket may be left.
A program that has ended before its kill is tried again. At the end a table has a row for each kind.
"""

import argparse
import os
import random
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
GONE_SECONDS = 10.0
_EVENT_SECONDS = 600.0  # the longest wait for an event on a busy machine
_SHARED_MEMORY = "/dev/shm/"
_READY = re.compile(r"^(ready|step 0|0 )", re.MULTILINE)  # the loops print their first step
_USED = re.compile(r"^(used|step 0|0 )", re.MULTILINE)
_TRIES = 3  # of a kill whose program ends before
_SMALL = "max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, dtype='float32', verbose=False, compile=False"

_SERVICE = f"""
import sys
from generation import AsyncVLLM
from vllm import SamplingParams
print("begun", flush=True)
service = AsyncVLLM.from_pretrained(sys.argv[1], {_SMALL}, backend=BACKEND)
print("ready", flush=True)
while True:
    service.generate([5, 6, 7], SamplingParams(max_tokens=4))
    print("used", flush=True)
"""
_GENERATION = """
import sys
import torch
from generation import BatchedDataDict, VllmConfig, VllmGeneration
print("begun", flush=True)
config = VllmConfig(backend="vllm", model_name=sys.argv[1], max_new_tokens=4, temperature=1.0)
config["vllm_cfg"] = {"max_model_len": 64, "skip_tokenizer_init": True, "expose_http_server": False}
generation = VllmGeneration(config)
print("ready", flush=True)
data = BatchedDataDict({"input_ids": torch.tensor([[5, 6, 7]]), "input_lengths": torch.tensor([3])})
while True:
    generation.generate(data)
    print("used", flush=True)
"""
_TRAINING = """
import sys
import tempfile
from hotbunk import Datum, Training
print("begun", flush=True)
engine = {"max_model_len": 64, "kv_cache_gib": 0.03125}
with Training(sys.argv[1], lora_rank=4, policy={"dtype": "float32"}, engine=engine) as training:
    while True:
        answers = training.sample([[5, 6, 7]], n=4, max_tokens=4)
        print("ready", flush=True)
        data = [Datum.answer(a.prompt_ids, a.token_ids, logprobs=a.logprobs, advantage=1.0) for a in answers[0]]
        training.forward_backward(data, "ppo")
        training.forward_backward(data, lambda data, logprobs: -sum(p.sum() for p in logprobs))
        training.optim_step(1e-4)
        training.logprobs(data)
        weights = training.snapshot()
        training.save("saved")
        training.load("saved")
        training.sample([[5, 6, 7]], n=4, max_tokens=4, weights=weights)
        print("used", flush=True)
"""
PROGRAMS = {
    "service": _SERVICE.replace("BACKEND", "'local'"),
    "ray": _SERVICE.replace("BACKEND", "'ray'"),
    "generation": _GENERATION,
    "accelerate": ROOT / "scripts/examples/accelerate_loop.py",
    "training": _TRAINING,
}
"""The kinds of program: texts, or files; each takes the folder of a model."""

EVENTS = ("start", "engine", "ready", "used")


@dataclass
class Program:
    """A running program and everything that it has been seen to have. Its files are below `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path
    family: dict[int, psutil.Process] = field(default_factory=dict)
    memory: set[Path] = field(default_factory=set)

    @classmethod
    def start(cls, kind: str, model: Path, folder: Path) -> "Program":
        """Start a program of this kind."""
        program = PROGRAMS[kind]
        if isinstance(program, str):
            script = folder / "program.py"
            script.write_text(program)
        else:
            script = program
        steps = ["--steps", "1000"] if kind == "accelerate" else []
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "HF_HUB_OFFLINE": "1",
        }
        environment["PYTHONUNBUFFERED"] = "1"  # an event is seen when it is printed
        output = (folder / "output").open("wb")
        command = [sys.executable, str(script), str(model), *steps]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        return cls(process, folder)

    def look(self) -> None:
        """Note the processes below the program, and the shared memory that they have mapped."""
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.family |= {process.pid: process for process in below}
        for process in list(self.family.values()):
            with suppress(OSError):  # it has ended
                lines = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace").splitlines()
                paths = [line.split(maxsplit=5)[-1] for line in lines if _SHARED_MEMORY in line]
                self.memory |= {Path(path) for path in paths if not path.endswith("(deleted)")}

    def wait_for(self, event: str) -> None:
        """Wait until the program has passed the event. Raises RuntimeError where it ends before."""
        output = self.folder / "output"
        passed: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "engine": lambda: any("spawn_main" in " ".join(_command(p)) for p in self.family.values()),
            "ready": lambda: _READY.search(output.read_text()) is not None,
            "used": lambda: _USED.search(output.read_text()) is not None,
        }
        deadline = time.monotonic() + _EVENT_SECONDS
        while not passed[event]():
            self.look()
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no event {event!r}: {output.read_text()[-1000:]}")
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """Return what is there of the program's processes, shared memory and sockets."""
        processes = [process for process in self.family.values() if _lives(process)]
        strangers = [process for process in psutil.process_iter() if _below(process, self.folder)]
        left = [
            f"process {p.pid} {' '.join(_command(p))[:120]}"
            for p in {*processes, *strangers}
            if _lives(p)
        ]
        left += [str(path) for path in self.memory if path.exists()]
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode) or path.name.startswith("hotbunk-"):
                    left.append(str(path))
        return left


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _below(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


def kill(
    kind: str, model: Path, event: str, delay: float, gone_seconds: float = GONE_SECONDS
) -> list[str] | None:
    """Start a program, kill it `delay` seconds after the event, and return what is left after `gone_seconds`.

    Return None where the program has ended before. Raises RuntimeError where it ends before the event.
    """
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp", ignore_cleanup_errors=True) as name:
        program = Program.start(kind, model, Path(name))
        try:
            program.wait_for(event)
            until = time.monotonic() + delay
            while time.monotonic() < until:
                program.look()
                time.sleep(0.05)
        finally:
            program.look()
            program.process.send_signal(signal.SIGKILL)
            status = program.process.wait()
        deadline = time.monotonic() + gone_seconds
        while (left := program.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.25)
        for process in program.family.values():
            with suppress(psutil.Error):
                process.kill()
        return left if status == -signal.SIGKILL else None


def kill_at_random(kind: str, model: Path, number: int, dice: random.Random) -> list[str] | None:
    """Kill a program of this kind at the event that is due for this number, and print what is left.

    Return None where the program has ended before each of some tries.
    """
    event = EVENTS[number % len(EVENTS)]
    for _ in range(_TRIES):
        delay = dice.uniform(0.0, 8.0 if event in ("start", "engine") else 1.0)
        began = time.monotonic()
        try:
            left = kill(kind, model, event, delay)
        except RuntimeError as error:
            print(f"{kind} {number}: {error}", flush=True)
            continue
        outcome = "had ended" if left is None else "; ".join(left) or "nothing left"
        print(
            f"{kind} {number}: {event} + {delay:.2f} s ({time.monotonic() - began:.0f} s): {outcome}",
            flush=True,
        )
        if left is not None:
            return left
    return None


def main() -> int:
    """Kill programs as the arguments say, and return 1 if one has left something or could not be killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--kinds", nargs="+", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.kinds:
        dice = random.Random(f"{arguments.seed} {kind}")
        outcomes = [
            kill_at_random(kind, arguments.model.resolve(), number, dice)
            for number in range(arguments.kills)
        ]
        valid = [left for left in outcomes if left is not None]
        rows.append((kind, len(valid), sum(bool(left) for left in valid)))
    print("\n| kind | kills | something left |\n|---|---|---|")
    for row in rows:
        print("| {} | {} | {} |".format(*row))
    return int(any(kills < arguments.kills or failures for _, kills, failures in rows))


if __name__ == "__main__":
    sys.exit(main())
