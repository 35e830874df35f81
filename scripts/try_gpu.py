#!/usr/bin/env python3
"""The checks of scripts/try_gpu.sh: which there are, what they need, and how they are run. Needs Python alone.

Each check is a process with a deadline. Its output goes to NAME.log, and its outcome is a line of results.jsonl that is
written at once, so that a machine that is lost takes only the check that ran.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PROBE = """
import importlib.util, json
def has(name): return importlib.util.find_spec(name) is not None
facts = {name: has(name) for name in ("torch", "vllm", "pytest", "triton", "transformers", "trl")}
facts["new_torch"] = facts["gpu"] = False
if facts["torch"]:
    import torch
    facts["new_torch"] = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    facts["gpu"] = torch.cuda.is_available()
print(json.dumps(facts))
"""
LACKS = {
    "gpu": "there is no GPU, or --cpu leaves it alone",
    "torch": "there is no torch",
    "new_torch": "torch is older than 2.13",
    "vllm": "there is no vLLM",
    "pytest": "there is no pytest",
    "triton": "there is no Triton",
    "transformers": "there is no Transformers",
    "trl": "there is no TRL",
}
DEADLINE = 3  # times the estimate, at which a check is ended
LEAST_SECONDS = 120  # of a check's deadline, as imports alone take long on a busy machine
MINUTES = 10.0  # for all checks together; who gives more has a slower machine, and longer deadlines
LINE_CHARACTERS = 160  # of a line of a check's output, in the table
LINES = 6  # of a check's output, in the table


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        seconds: how long it takes on an H100, by estimate. A check begins only if so much time is left.
        needs: names of `LACKS`.
        expected: what its output should say.
        command: words after the interpreter; FOLDER in them is the folder for results.
        on_cpu: the command with --cpu, if that is another one.
        lines: a pattern of the lines of its output that are its result. If there are none, the last line is.
        public: figures of others, or earlier ones, to read beside its own.
    """

    name: str
    seconds: int
    needs: tuple[str, ...]
    expected: str
    command: tuple[str, ...]
    on_cpu: tuple[str, ...] | None = None
    lines: str = ""
    public: tuple[str, ...] = ()


PYTEST = ("-m", "pytest", "-n", "0", "-q", "-rs", "-s")
COLOCATED = "tests/gpu/test_colocated.py"
STEP = ("--dtype", "bfloat16", "--sequences", "64", "--longest", "1024", "--budget", "16384")
SMALL_STEP = (
    *("scripts/bench/train_step.py", "--preset", "10M"),
    *("--sequences", "4", "--longest", "64", "--rounds", "1"),
)
RUN = ("scripts/try_gpu.py", "run", "FOLDER")
TRAINER = ("torch", "transformers")
TESTS = (*TRAINER, "pytest", "gpu")
LONG = ("--sequences", "2", "--rows", "2", "--exactly", "16384", "--budget", "16384", "--recompute")
BASELINES = (  # benchmarks/baselines/*.json of https://github.com/PrimeIntellect-ai/prime-rl, at 559b447
    "prime-rl, one H100, Qwen3-0.6B, all weights, 2 x 16,384 tokens, recomputed: 11,896 tokens/s, 11.1 % MFU",
    "prime-rl, one H100, Qwen3-0.6B, all weights, 2 x 65,536 tokens, recomputed: 10,147 tokens/s, 26.8 % MFU",
    "prime-rl, one H100, Qwen3-4B-Instruct-2507, LoRA 16, 2 x 16,384, recomputed: 6,229 tokens/s, 21.7 % MFU",
)

CHECKS = (
    Check(
        "facts",
        15,
        TRAINER,
        "ok in each line, float32 products in highest precision",
        ("-m", "trainer", "doctor", "--facts", "--output", "FOLDER/facts.json"),
        lines="float32 products",
    ),
    Check(
        "kernels",
        30,
        TESTS,
        "no test fails",
        (*PYTEST, "tests/gpu/test_head_cuda.py", "tests/gpu/test_shared_prefixes_cuda.py"),
    ),
    Check(
        "head",
        20,
        TRAINER,
        "about 77 ms for blocks on an H100",
        ("scripts/bench/head.py", "--tokens", "8192", "--hidden", "2560", "--dtype", "bfloat16"),
        (
            "scripts/bench/head.py",
            "--tokens",
            "64",
            "--hidden",
            "64",
            "--vocabulary",
            "2048",
            "--rounds",
            "1",
        ),
        lines=r"^(chunks|blocks|trl) ",
    ),
    Check(
        "update",
        90,
        TRAINER,
        "the norms of both gradients agree",
        ("scripts/bench/train_step.py", "--preset", "0.5B", *STEP, "--variants", "padded", "packed"),
        (*SMALL_STEP, "--variants", "packed"),
        lines=r"^(padded|packed) ",
        public=(
            "Hotbunk f866120, one H100, packed: 0.6 s, 44,276 tokens/s; padded: 0.8 s, 32,643 tokens/s",
        ),
    ),
    Check(
        "products",
        20,
        ("torch", "triton", "pytest", "gpu"),
        "1e-3 by default, 1e-6 with ieee",
        (*PYTEST, "tests/gpu/test_products_cuda.py"),
    ),
    Check("host", 30, TESTS, "no test fails", (*PYTEST, "tests/gpu/test_host_update_cuda.py")),
    Check(
        "float32",
        100,
        (*TRAINER, "new_torch", "vllm"),
        "gap/max of at most 1e-5",
        (*RUN, "float32", "--engine.enforce_eager", "true"),
        (*RUN, "float32"),
    ),
    Check(
        "shifts",
        110,
        (*TESTS, "vllm"),
        "no test fails, and memory is flat",
        (*PYTEST, COLOCATED, "-k", "trainers or back or flat"),
    ),
    Check(
        "graphs",
        110,
        (*TRAINER, "new_torch", "vllm", "gpu"),
        "memory of the engine, awake and asleep",
        (*RUN, "graphs", "--engine.enforce_eager", "false", "--engine.deep_sleep", "true"),
    ),
    Check(
        "start",
        60,
        (*TESTS, "new_torch", "vllm"),
        "at most 1.05 x the plan",
        (*PYTEST, "tests/gpu/test_planned_memory.py", "-k", "start and keys1"),
    ),
    Check(
        "long",
        60,
        TRAINER,
        "a greater share of the matmul rate than in update",
        (
            "scripts/bench/train_step.py",
            "--preset",
            "0.5B",
            "--dtype",
            "bfloat16",
            *LONG,
            "--variants",
            "packed",
        ),
        (
            "scripts/bench/train_step.py",
            "--preset",
            "10M",
            "--sequences",
            "2",
            "--rows",
            "2",
            "--exactly",
            "256",
            "--recompute",
            "--rounds",
            "1",
            "--variants",
            "packed",
        ),
        lines=r"^packed ",
        public=BASELINES,
    ),
    Check(
        "trl_step",
        120,
        (*TRAINER, "trl"),
        "packed takes less time than TRL",
        (
            "scripts/bench/train_step.py",
            "--preset",
            "0.5B",
            *STEP,
            "--variants",
            "TRL",
            "packed",
            "--rounds",
            "2",
        ),
        (*SMALL_STEP, "--variants", "TRL", "packed"),
        lines=r"^(TRL|packed) ",
    ),
    Check(
        "trl_sync",
        110,
        (*TRAINER, "new_torch", "vllm", "trl"),
        "sync and pull take less time than TRL",
        (
            "scripts/bench/weight_sync.py",
            "--presets",
            "0.5B",
            "--dtype",
            "bfloat16",
            "--only",
            "sync",
            "pull",
            "peers",
        ),
        (
            "scripts/bench/weight_sync.py",
            "--presets",
            "1M",
            "--rounds",
            "2",
            "--only",
            "sync",
            "pull",
            "peers",
        ),
        lines=r"^(memcpy|sync|pull|TRL|verl)",
    ),
)
"""In the order in which they are run: kernels first, then what starts an engine, one at a time, then peers."""


def main(arguments: argparse.Namespace) -> int:
    """Run the checks and print their table; 1 if one failed."""
    folder = arguments.output or Path(tempfile.mkdtemp(prefix="try-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    environ = dict(os.environ)
    environ.pop("PYTHONSAFEPATH", None)  # the scripts of a folder import each other
    if arguments.cpu:
        environ |= {"CUDA_VISIBLE_DEVICES": ""}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=environ, capture_output=True, text=True, check=True
    )
    facts = json.loads(probe.stdout)
    ends = time.monotonic() + 60 * arguments.minutes
    rows = []
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        for check in chosen(arguments.names):
            left = ends - time.monotonic()
            reason = why_not(check, facts, left)
            row = {"name": check.name, "outcome": "skipped", "results": [reason]}
            if not reason:
                print(f"try_gpu: {check.name} (about {check.seconds} s)", file=sys.stderr, flush=True)
                patience = max(1.0, arguments.minutes / MINUTES)
                deadline = min(left, patience * max(LEAST_SECONDS, DEADLINE * check.seconds))
                row = run(check, folder, environ, deadline, on_cpu=arguments.cpu)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
    print_table(rows)
    print(f"logs and results.jsonl: {folder}")
    return int(any(row["outcome"] in ("failed", "deadline") for row in rows))


def print_table(rows: list[Row]) -> None:
    """Print each check's outcome, its seconds and its results, and below them what to expect and public figures."""
    for row in rows:
        first, *more = row["results"]
        print(f"{row['name']:9} {row['outcome']:8} {row.get('seconds', ''):>6}  {first}")
        notes = [f"expected: {row['expected']}"] if row["outcome"] != "skipped" else []
        notes += [f"public: {figure}" for figure in row.get("public", ())]
        for line in (*more, *notes):
            print(f"{'':27}{line}")


def chosen(names: list[str]) -> Iterator[Check]:
    """Yield the checks with these names, or all. Raises SystemExit for a name that there is not."""
    unknown = set(names) - {check.name for check in CHECKS}
    if unknown:
        raise SystemExit(
            f"try_gpu: there is no check {', '.join(sorted(unknown))}: name some of {listed()}"
        )
    yield from (check for check in CHECKS if not names or check.name in names)


def listed() -> str:
    """Return the names of all checks."""
    return ", ".join(check.name for check in CHECKS)


def why_not(check: Check, facts: dict[str, bool], left: float) -> str:
    """Return why a check is not run with so many seconds left; "" if it is."""
    lacking = [LACKS[need] for need in check.needs if not facts[need]]
    if lacking:
        return "; ".join(lacking)
    return (
        ""
        if left >= check.seconds
        else f"{left:.0f} s are left, and it takes about {check.seconds}: --minutes"
    )


def run(check: Check, folder: Path, environ: dict[str, str], deadline: float, *, on_cpu: bool) -> Row:
    """Run one check, and return its row; its processes are killed after `deadline` seconds."""
    command = check.on_cpu if on_cpu and check.on_cpu else check.command
    words = [sys.executable, *(word.replace("FOLDER", str(folder)) for word in command)]
    log = folder / f"{check.name}.log"
    began = time.monotonic()
    outcome = "ok"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(deadline)
            outcome = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "deadline"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    row = {"name": check.name, "outcome": outcome, "seconds": round(time.monotonic() - began)}
    row |= {"results": results(lines, check.lines), "expected": check.expected, "public": check.public}
    return row | {"command": words, "tail": lines[-20:]}


def results(lines: list[str], pattern: str) -> list[str]:
    """Return the lines that a pattern finds, at most `LINES` of them, or the last one if it finds none."""
    matching = [line for line in lines if pattern and re.search(pattern, line)]
    shown = matching[-LINES:] or lines[-1:] or ["it printed nothing"]
    return [line[-LINE_CHARACTERS:] for line in shown]


def train(folder: Path, name: str, overrides: list[str]) -> int:
    """Train a tiny model for three steps, staged and in float32, and print its largest gap and its engine's memory."""
    recipe = folder / name / "recipe.yaml"
    runs = folder / "runs"
    module = [sys.executable, "-m", "trainer"]
    subprocess.run([*module, "new", str(folder / name)], check=True)
    keys = [
        "--run.name",
        name,
        "--run.output_dir",
        str(runs),
        "--run.steps",
        "3",
        "--sync.way",
        "staged",
    ]
    keys += ["--sync.verify", "full", "--checkpoint.every", "0", "--checkpoint.resume", "none"]
    subprocess.run([*module, "train", str(recipe), *keys, *overrides], check=True)
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text("utf-8").splitlines()]
    shown = {
        key: row[key]
        for row in rows
        for key in row
        if key == "gap/max" or key.startswith("memory/engine")
    }
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(train(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    parser = argparse.ArgumentParser(description="Ten minutes on a new GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {listed()}")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="time for all checks together (default: 10)"
    )
    parser.add_argument("--cpu", action="store_true", help="run what a CPU can, at small sizes")
    parser.add_argument(
        "--output", type=Path, help="folder for logs and results (default: a new temporary one)"
    )
    sys.exit(main(parser.parse_args()))
