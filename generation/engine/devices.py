"""Find out whether CUDA can be used here and on how many devices, without initialising CUDA."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

DRIVERS = {12: 525, 13: 580}
"""The oldest driver that runs each major release of CUDA
(https://docs.nvidia.com/deploy/cuda-compatibility/).
"""

SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that several ranks on one machine should have."""

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY_FOLDER = "/dev/shm"


def gpu_visible() -> bool:
    """Return True if there is an NVIDIA driver (also under WSL) and CUDA_VISIBLE_DEVICES does not
    hide all GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
    return not hidden and any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))


def cuda_problem() -> str | None:
    """Return the reason why this process cannot use CUDA, and the remedy; None if it can. Do not
    import torch.

    The reason goes on after "run.device is cuda, but".

    A driver whose version is unknown (under WSL) is assumed to fit torch's release of CUDA.
    """
    if not gpu_visible():
        return "this machine shows no NVIDIA GPU: set it to cpu or auto"
    built_for = torch_cuda()
    if built_for is None:
        return (
            "the installed torch is a build for CPUs: get one for CUDA by HOTBUNK_DEVICE=cuda bash "
            "scripts/setup.sh"
        )
    needed = DRIVERS.get(int(built_for.partition(".")[0]))
    driver = driver_version()
    compatible = os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0").lower() in ("1", "true")
    if compatible or needed is None or driver is None or int(driver.partition(".")[0]) >= needed:
        return None
    return (
        f"the NVIDIA driver {driver} is too old for CUDA {built_for}, which needs {needed}: update it, "
        "or, for a data-centre card, put NVIDIA's cuda-compat on LD_LIBRARY_PATH and set "
        "VLLM_ENABLE_CUDA_COMPATIBILITY=1"
    )


def driver_version() -> str | None:
    """Return the version of the loaded driver (`580.65.06`); None if the driver does not report
    one.
    """
    try:
        match = re.search(r"Kernel Module[^\n]*?\s(\d+(?:\.\d+)+)\s", _DRIVER_FILE.read_text("utf-8"))
    except OSError:
        return None
    return match and match[1]


def torch_cuda() -> str | None:
    """Return the release of CUDA that the installed torch is built for (`13.0`); None for a build
    without CUDA.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match and match[1]


def device_count() -> int:
    """Return the number of CUDA devices that this process can use; 0 if it cannot use CUDA."""
    if cuda_problem() is not None:
        return 0
    import torch

    return torch.cuda.device_count()


def device_names() -> list[str]:
    """Return the names of this process's CUDA devices, as in CUDA_VISIBLE_DEVICES; an empty list
    without CUDA.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return [name.strip() for name in visible.split(",")]
    return [str(index) for index in range(device_count())]


def first_devices(count: int) -> tuple[int, ...]:
    """Return the indices of the first `count` CUDA devices; () without CUDA. Raises ValueError if
    there are fewer.
    """
    available = device_count()
    if 0 < available < count:
        raise ValueError(
            f"{count} CUDA devices are needed, but only {available} here: lower tensor_parallel_size"
        )
    return tuple(range(count)) if available else ()


def this_device() -> Callable[[], None]:
    """Return a function that sets the CUDA device of the thread that calls it to the device of this
    thread.

    A new thread should call it first, since threads start on device 0. Otherwise it would wait for
    the streams of that device, whichever device its tensors are on, and would thereby create a
    context there, which takes half a gigabyte for every process
    (https://docs.pytorch.org/docs/stable/notes/cuda.html).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def sharing_problems(local_ranks: int, workers: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield reasons why the trainer's ranks on this machine and one engine's workers cannot share
    its GPUs.
    """
    modes = _modes(environ.get("CUDA_VISIBLE_DEVICES", ""))
    if "Exclusive" in modes or "Prohibited" in modes:
        yield (
            "a GPU is in exclusive or prohibited compute mode, but trainer and engine are two "
            "processes on it: sudo nvidia-smi --compute-mode=DEFAULT"
        )
    if local_ranks > 1 and "Enabled" in modes:
        yield (
            "the GPUs are cut into MIG slices, and a process sees one slice only, so that several "
            "ranks cannot join: start one rank on one slice, or sudo nvidia-smi --multi-instance-gpu=0"
        )
    if (
        max(local_ranks, workers) > 1
        and (free := shutil.disk_usage(_SHARED_MEMORY_FOLDER).free) < SHARED_MEMORY
    ):
        yield (
            f"{_SHARED_MEMORY_FOLDER} has {free >> 20} MiB left, but NCCL and vLLM exchange data "
            f"between the processes of a machine through it: give it {SHARED_MEMORY >> 20} (docker run "
            "--shm-size 2g, or --ipc host)"
        )


def _modes(visible: str) -> str:
    """Return compute mode and MIG mode of the visible GPUs as nvidia-smi prints them; empty without
    nvidia-smi.
    """
    if visible.startswith("MIG"):
        return "Enabled"
    return _ask_driver("compute_mode,mig.mode.current", *([f"--id={visible}"] if visible else []))


def full_uuids(devices: list[str]) -> list[str]:
    """Return devices, named as in CUDA_VISIBLE_DEVICES, with their UUIDs completed.

    CUDA accepts the beginning of a UUID. NVML, which vLLM asks, does not
    (https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html,
    nvmlDeviceGetHandleByUUID).
    """
    if not any(device.startswith("GPU-") for device in devices):
        return devices
    uuids = _ask_driver("uuid").split()
    completed = []
    for device in devices:
        matching = [uuid for uuid in uuids if "-" in device and uuid.startswith(device)]
        completed.append(matching[0] if matching else device)
    return completed


def _ask_driver(properties: str, *options: str) -> str:
    """Return the output of nvidia-smi for these properties, one line per GPU; empty without
    nvidia-smi.
    """
    command = ["nvidia-smi", f"--query-gpu={properties}", "--format=csv,noheader", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
