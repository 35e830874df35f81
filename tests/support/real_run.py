"""Start the real command under torchrun on a tiny model, watches and signal it, and looks for what it leaves."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support import shared_memory
from tests.support.preloaded import Launcher
from tests.support.rows import write_rows

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
GONE_SECONDS = 20.0  # as README promises
MACHINE_FIGURES = ("time/", "throughput/", "memory/")


def write_recipe(folder: Path, model: Path, /, **overrides: dict[str, Any]) -> Path:
    """Write a recipe for a few steps on generated additions; `overrides` are merged into its sections."""
    from scripts.examples.tasks.arithmetic import write_arithmetic

    write_arithmetic(folder / "data", eval_size=16, sft_size=8)
    rows = (folder / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "train.jsonl").write_text("".join(rows[:1024]))  # every rank reads every row
    recipe: dict[str, dict[str, Any]] = {
        "run": {
            "output_dir": str(folder / "runs"),
            "steps": 4,
            "step_deadline_s": 120,
            "first_step_deadline_s": 240,
        },
        "model": {"path": str(model)},
        "data": {
            "path": str(folder / "data" / "train.jsonl"),
            "max_prompt_tokens": 32,
        },
        "sampling": {"max_tokens": 6},
        "eval": {"datasets": {"held_out": {"path": str(folder / "data" / "eval.jsonl")}}},
        "engine": {"max_model_len": 64, "max_num_seqs": 32, "kv_cache_gib": 0.03125},
        "sync": {"verify": "full", "bucket_mib": 1, "timeout_s": 60},
        "policy": {"dtype": "float32", "lr": 1e-3},
        "algorithm": {"group_size": 4},
        "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 256, "shared_tokens_min": 2},
        # Random models are hardly ever right: a reward of characters gives every group something to learn.
        "reward": {
            "functions": [{"name": f"{ROOT}/tests/support/digit_reward.py:many_digits"}],
            "workers": 1,
        },
        "tracking": {"wandb": "disabled"},
    }
    for section, values in overrides.items():
        recipe.setdefault(section, {}).update(values)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def multimodal_sections(folder: Path, **sizes: Any) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Make a tiny multimodal model, and a recipe's sections for it: rows of 0, 1 and 2 images of different sizes.

    `sizes` are arguments of `make_tiny_vlm`.
    """
    from scripts.tiny_vlm import make_tiny_vlm
    from tests.support.pictures import picture

    for width in (28, 56, 84):
        picture(width, 56).save(folder / f"{width}.png")
    images = [[], ["56.png"], ["28.png", "84.png"]]
    rows = [{"prompt": f"Count {n}: ", "image": images[n % 3]} for n in range(36)]
    for name, some in {"image_train": rows[:24], "image_eval": rows[24:30]}.items():
        write_rows(folder / f"{name}.jsonl", some)
    data = {
        "path": str(folder / "image_train.jsonl"),
        "image_key": "image",
        "max_images": 2,
        "max_prompt_tokens": 64,
    }
    sections: dict[str, dict[str, Any]] = {
        "data": data | {"answer_key": None},
        "eval": {"datasets": {"held_out": {"path": str(folder / "image_eval.jsonl")}}},
        "engine": {"max_model_len": 96},
    }
    return make_tiny_vlm(folder / "multimodal", largest_image=2, **sizes), sections


class Run:
    """One run of `scripts/train.sh` in the background, all of whose processes carry a mark in their environment."""

    def __init__(
        self,
        recipe: Path,
        *arguments: str,
        ranks: int = 2,
        name: str = "run",
        phases: Path | None = None,
        stale: str | None = None,
        imports: Path | None = None,
        preloaded: bool = False,
    ) -> None:
        """Start the run.

        Args:
            phases: a folder in which each rank keeps the name of its current phase.
            stale: VERSION:TOKEN; with weights of that version, engines keep the previous version's embedding of the
                token, which no verification notices.
            imports: a file to which every process appends the modules for images that it imports.
            preloaded: fork ranks and engines (see `preloaded.py`), for tests that do not look at how they start.
        """
        self.folder = recipe.parent / "runs" / name
        self.mark = uuid.uuid4().hex
        self.log = recipe.parent / f"{name}-{self.mark[:6]}.log"
        self._before = shared_memory.files()
        self._private: set[Path] = set()
        self.listened: dict[str, dict[int, set[str]]] = {}  # moment -> process -> addresses
        environment = os.environ | {
            "NPROC_PER_NODE": str(ranks),
            "HOTBUNK_TEST_RUN": self.mark,
            "SPT_NOENV": "1",  # else an engine would overwrite its mark with its name
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        changes = {
            "HOTBUNK_TEST_PHASES": phases,
            "HOTBUNK_TEST_STALE": stale,
            "HOTBUNK_TEST_IMPORTS": imports,
        }
        for variable, value in changes.items():
            if value is not None:
                paths = [
                    str(ROOT / "tests/support/changing"),
                    *filter(None, [os.environ.get("PYTHONPATH")]),
                ]
                environment |= {variable: str(value), "PYTHONPATH": ":".join(paths)}
        options = [str(recipe), "--run.name", name, *arguments]
        if preloaded:
            self.log.touch()
            restarts = os.environ.get("RESTARTS")  # as `launch` reads it
            launch = ["trainer.run.supervisor", restarts] if restarts else ["trainer.launcher"]
            launch += ["--nproc-per-node", str(ranks), "-m", "trainer", "train", *options]
            environment |= {
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": str(ROOT),
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
            }
            self.process: Any = Launcher(launch, environment, self.log)
            return
        command = ["bash", str(ROOT / "scripts/train.sh"), *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl so far."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def comparable_rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl without figures that differ from machine to machine."""
        return [
            {k: v for k, v in row.items() if not k.startswith(MACHINE_FIGURES)} for row in self.rows()
        ]

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> Any:
        """Polls until the condition returns a true value, and returns it; fails with the run's output."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s:\n{self.output()}"
            time.sleep(0.05)
        return value

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: len(self.rows()) >= count, f"row {count} of metrics.jsonl")

    def watch_listening(self) -> None:
        """Record in `listened`, five times a second until the run ends, where its processes listen."""
        while self.process.poll() is None:
            saved = any((self.folder / "checkpoints").glob("step_*"))
            moment = "with a checkpoint" if saved else "steps" if self.rows() else "start-up"
            for pid, addresses in listening({process.pid for process in self.processes()}).items():
                self.listened.setdefault(moment, {}).setdefault(pid, set()).update(addresses)
            time.sleep(0.2)
        assert self.listened, (self.process.returncode, self.output())

    def summary(self) -> list[str]:
        """Return the launcher's last lines."""
        return summary(self.output())

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Wait for the end, and return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(
                f"the run did not end within {seconds:.0f} s:\n{self.output()}"
            ) from None

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Living processes of the run whose command line contains `name`."""
        # The mark as `digit_reward.LeavesProcesses` writes it
        living, number = [], str(int(self.mark, 16))
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                ours = number in line or process.environ().get("HOTBUNK_TEST_RUN") == self.mark
                # A forked process has its server's environment, but the run's standard error.
                ours = ours or os.readlink(f"/proc/{process.pid}/fd/2") == str(self.log)
                if ours and name in line and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
                continue
        return living

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks, in order."""
        ranks: dict[int, psutil.Process] = {}
        for guardian in self.processes("guardian.py"):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                # An inner guardian's last arguments: its child, the process above it, a folder, and the child's name.
                child, _, _, name = guardian.cmdline()[-4:]
                if name.startswith("rank "):
                    ranks[int(name.removeprefix("rank "))] = psutil.Process(int(child))
        return [ranks[number] for number in sorted(ranks)]

    def guardians(self) -> list[psutil.Process]:
        """Return the ranks' guardians, inner and outer."""
        return self.processes("guardian.py")

    def engines(self) -> list[psutil.Process]:
        """Return the engine cores, once they have set their process name."""
        return self.processes("VLLM::EngineCore")

    def reward_workers(self) -> list[psutil.Process]:
        """Return the processes that call reward functions, and their watchers; their groups are in a rank's session."""
        workers = []
        for process in self.processes("spawn_main"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) != os.getpgid(process.pid) in (process.pid, process.ppid()):
                    workers.append(process)
        return workers

    def left_behind(self) -> list[str]:
        """List what is left of a run that has ended: processes, shared memory, private folders."""
        self.note_private_folders()
        files = shared_memory.left_since(self._before) | {f for f in self._private if f.exists()}
        return [str(process) for process in self.processes()] + [str(file) for file in files]

    def note_private_folders(self) -> None:
        """Remembers the ranks' private folders, which are on their guardians' command lines."""
        for guardian in self.processes("guardian.py"):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._private |= {
                    Path(word) for word in guardian.cmdline() if Path(word).name.startswith("hotbunk-")
                }

    def assert_gone(self) -> None:
        """Within 20 s from now, nothing of the run is left."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.left_behind():
            assert time.monotonic() < deadline, f"left behind: {left}\n{self.output()}"
            time.sleep(0.1)

    def kill_everything(self) -> None:
        """Kill all processes of the run."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


def summary(output: str) -> list[str]:
    """Return the launcher's lines, if they are the last on the screen; guardians' lines look alike, and come before."""
    lines = output.splitlines()
    begin = max(
        (i for i, line in enumerate(lines) if line.startswith("[hotbunk] the run ")), default=len(lines)
    )
    alike = all(line.startswith("[hotbunk] ") for line in lines[begin:])
    return [line.removeprefix("[hotbunk] ") for line in lines[begin:]] if alike else []


def listening(pids: set[int]) -> dict[int, set[str]]:
    """Return the addresses at which processes listen by TCP, found by comparing their descriptors with the kernel's tables."""
    owners: dict[str, int] = {}
    for pid in sorted(pids):  # until it execs, a child has its parent's descriptors
        with contextlib.suppress(OSError):  # the process has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners.setdefault(os.readlink(descriptor), pid)
    addresses: dict[int, set[str]] = {}
    for table, family, length in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and owner is not None:  # LISTEN
                words = [int(fields[1][i : i + 8], 16) for i in range(0, length, 8)]
                addresses.setdefault(owner, set()).add(
                    socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                )
    return addresses


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """List where two metrics files differ, bit for bit."""
    lines = [f"{len(first)} and {len(second)} rows"] if len(first) != len(second) else []
    for one, two in zip(first, second, strict=False):
        step = one["train/step"]
        lines += [
            f"step {step} {k}: {one.get(k)} {two.get(k)}"
            for k in one.keys() | two.keys()
            if one.get(k) != two.get(k)
        ]
    return lines


if __name__ == "__main__":
    print(write_recipe(Path(sys.argv[1]), Path(sys.argv[2])))
