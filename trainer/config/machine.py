"""Checks of the machine that a recipe runs on: variables of the ranks, memory, devices, writable
folders. No torch.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from generation import shims
from generation.engine.allocator import ALLOCATOR_VARIABLES
from generation.engine.devices import cuda_problem, gpu_visible, sharing_problems, torch_cuda
from trainer.config.schema import TrainConfig
from trainer.errors import UserError, quoted

_RANK_VARIABLES = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
"""The variables that torchrun sets for a rank, with the least value of each."""

FLOAT32_VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT")
# Bytes; of Linux's 4095 for a path, the run's files need some
_LONGEST_NAME = 255
_LONGEST_PATH = 3900


def check_torch_libraries(versions: Callable[[str], str] = version) -> None:
    """Raise UserError if torchvision or torchaudio is a build for CUDA and torch one for CPUs, or
    the other way round.

    Their operators are then missing, and Transformers, which imports them if they are installed,
    cannot import any model (https://github.com/pytorch/vision/issues/9085). vLLM requires them, and
    pip installs PyPI's builds, which are for CUDA. `generation.shims` lets such a torchvision be
    imported beside a torch for CPUs.
    """
    installed = dict[str, str]()
    for name in ("torch", "torchvision", "torchaudio"):
        with suppress(PackageNotFoundError):
            installed[name] = versions(name)
    torch = installed.pop("torch", "")
    if shims.are_needed():
        installed.pop("torchvision", None)
    unfit = [
        name
        for name in installed
        if torch and installed[name].endswith("+cpu") != torch.endswith("+cpu")
    ]
    if unfit:
        named = " and ".join(f"{name} {installed[name]}" for name in unfit)
        remedy = f"pip uninstall -y {' '.join(unfit)}"
        raise UserError(
            f"no model can be imported beside {named}, built for another torch than {torch}: {remedy}"
        )


def rank_count(environ: Mapping[str, str]) -> int:
    """Return the number of ranks, from WORLD_SIZE. Raises UserError if torchrun's variables make no
    sense.
    """
    if problems := [*_rank_problems(environ)]:
        raise UserError(*problems)
    return int(environ.get("WORLD_SIZE", "1"))


def _rank_problems(environ: Mapping[str, str]) -> Iterator[str]:
    remedy = "unset it, or start the run with hotbunk train"
    texts = {name: environ[name] for name in _RANK_VARIABLES if name in environ}
    numbers = {name: int(text) for name, text in texts.items() if re.fullmatch("[0-9]{1,6}", text)}
    for name, text in texts.items():
        if numbers.get(name, -1) < _RANK_VARIABLES[name]:
            yield (
                f"{name} is {quoted(text)}, but should be a number from {_RANK_VARIABLES[name]} on: "
                f"{remedy}"
            )
            return
    for one, other in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if one in texts and other in texts and numbers[one] >= numbers[other]:
            yield f"{one} is {texts[one]}, but should be less than {other} = {texts[other]}: {remedy}"
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if "RANK" in texts else ():
        if name not in environ:
            yield (
                f"RANK is set, but {name} is not, so that this rank cannot find the others: set it, or "
                "unset RANK"
            )


def host_gib() -> float:
    """Return the memory of this machine in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def device_gib() -> float | None:
    """Return the memory in GiB of this machine's largest GPU; None if nvidia-smi is missing or does
    not say.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return max(float(line) for line in output.splitlines()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def unwritable(folder: Path) -> str | None:
    """Return the reason why a folder cannot be made or written to; None if it can. Leave nothing
    behind.
    """
    path = folder.absolute()
    if len(os.fsencode(path)) > _LONGEST_PATH or any(
        len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts
    ):
        return f"it has more than {_LONGEST_PATH} bytes, or a name in it has more than {_LONGEST_NAME}"
    try:
        while not os.path.lexists(path):
            path = path.parent
        with tempfile.TemporaryDirectory(prefix=".hotbunk-", dir=path):
            # Only a trial tells, since root passes permission checks.
            return None
    except NotADirectoryError:
        return f"{path} is not a folder"
    except OSError as error:
        return f"nothing can be written in {path} ({error.strerror})"


def resolve_device(config: TrainConfig) -> Literal["cpu", "cuda"]:
    """Return the device that `run.device` stands for, determined without torch."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if cuda_problem() is None else "cpu"


def float32_products(environ: Mapping[str, str]) -> str:
    """Return how trainer and engine compute float32 products on CUDA, with the variables that bear
    on it.

    torch starts with TF32 if TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is 1, as in NVIDIA's containers,
    until it is told otherwise, as `trainer.distributed` and vLLM tell it. NVIDIA_TF32_OVERRIDE
    overrides what its libraries are told, and TRITON_F32_DEFAULT is the precision of the engine's
    attention in float32.
    """
    settings = [f"{name}={environ[name]}" for name in FLOAT32_VARIABLES if name in environ]
    return ", ".join(["highest precision", *settings])


def check_device(config: TrainConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield problems with using CUDA as the recipe asks, and with sharing its memory between
    processes.
    """
    problem = cuda_problem()
    asked = config.run.device
    if problem and (asked == "cuda" or (asked == "auto" and gpu_visible() and torch_cuda())):
        yield f"run.device is {asked}, but {problem}"
    if resolve_device(config) == "cpu":
        return
    if problem is None:
        ranks = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE", "1"))
        yield from sharing_problems(ranks, config.engine.tensor_parallel_size, environ)
    for variable in ALLOCATOR_VARIABLES:
        if re.search(r"backend\s*:\s*cudaMallocAsync", environ.get(variable, "")):
            yield (
                f"{variable} sets backend:cudaMallocAsync, whose memory has no CUDA IPC: leave the "
                "backend out"
            )
