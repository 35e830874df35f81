"""The decision whether CUDA can be used, on simulated machines, and the devices that engines start with there."""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from generation import VllmGeneration, shims
from generation.compat.chatlearn.vllm_module import VLLMModule
from generation.compat.torchrl.service import AsyncVLLM
from generation.engine import devices
from generation.engine.settings import EngineSettings
from generation.engine.thread import EngineThread
from generation.engine.vllm_compat import engine_environment
from generation.rollouts.user_code import call_user
from tests.support.recipes import make_config
from trainer import distributed
from trainer.cli import main
from trainer.config.checks import find_problems
from trainer.config.machine import check_torch_libraries, resolve_device
from trainer.config.schema import CheckpointConfig, TrainConfig
from trainer.errors import UserError
from trainer.run import checkpoint, processes
from trainer.run.keeper import CheckpointWriter


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulates a machine with a GPU and a driver, and an installed torch built for some release of CUDA."""
    for variable in ("CUDA_VISIBLE_DEVICES", "VLLM_ENABLE_CUDA_COMPATIBILITY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(devices, "gpu_visible", lambda: True)
    monkeypatch.setattr("trainer.config.checks.gpu_visible", lambda: True)
    monkeypatch.setattr("trainer.config.machine.gpu_visible", lambda: True)
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(
        devices, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "torch").mkdir()

    def make(driver: str | None, cuda: str | None, module: str = "Kernel Module") -> None:
        (tmp_path / "version").unlink(missing_ok=True)
        if driver:
            text = f"NVRM version: NVIDIA UNIX x86_64  {module}  {driver}  Tue Mar  4 2026\nGCC version: gcc 13.2.0\n"
            (tmp_path / "version").write_text(text)
        lines = f"__version__ = '2.13.0'\ncuda: str | None = {cuda!r}\nhip: str | None = None\n"
        (tmp_path / "torch/version.py").write_text(lines)

    return make


def auto(device: str = "auto", **engine: Any) -> TrainConfig:
    return make_config(
        run={"device": device}, model={"path": "/no/model"}, data={"path": "no/data"}, engine=engine
    )


def device_problems(config: TrainConfig, **environ: str) -> list[str]:
    return [
        line
        for line in find_problems(config, "eval", environ)
        if not line.startswith(("data", "model", "reward"))
    ]


def test_the_release_of_cuda_is_read_without_importing_torch() -> None:
    assert devices.torch_cuda() == torch.version.cuda


@pytest.mark.parametrize(
    ("driver", "cuda", "problem"),
    [
        ("580.65.06", "13.0", None),
        ("610.10", "13.0", None),
        ("550.54.15", "12.8", None),
        (None, "13.0", None),  # WSL
        (
            "570.133.20",
            "13.0",
            "the NVIDIA driver 570.133.20 is too old for CUDA 13.0, which needs 580: update it",
        ),
        ("580.65.06", None, "the installed torch is a build for CPUs"),
    ],
)
@pytest.mark.parametrize("module", ["Kernel Module", "Open Kernel Module for x86_64"])
def test_the_automatic_device_is_cuda_where_driver_and_torch_permit_it(
    machine: Callable[..., None], driver: str | None, cuda: str | None, problem: str | None, module: str
) -> None:
    machine(driver, cuda, module)
    obstacle = devices.cuda_problem()
    assert (obstacle or "").startswith(problem or "") and bool(obstacle) == bool(problem)
    assert resolve_device(auto()) == ("cpu" if problem else "cuda")
    expected = [f"run.device is cuda, but {obstacle}"] if problem else []
    assert device_problems(auto("cuda")) == expected
    assert all(len(line) < 300 for line in expected)
    # A driver that is too old for the installed build is no choice of CPU; a CPU build of torch is.
    assert device_problems(auto()) == (
        [f"run.device is auto, but {obstacle}"] if problem and cuda else []
    )


def test_ranks_join_for_the_device_they_train_on(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[..., None]
) -> None:
    machine("570.133.20", "13.0")
    joined: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as with cuda-compat half installed
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        distributed.dist, "init_process_group", lambda backend, **_: joined.append(backend)
    )
    monkeypatch.setattr(distributed, "share_pids", lambda: None)
    distributed.init_process_group(60, "auto")
    machine("580.65.06", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    distributed.init_process_group(60, "auto")
    assert joined == ["gloo", "cpu:gloo,cuda:nccl"]
    monkeypatch.setattr(distributed, "_store", None)


def test_compatibility_libraries_make_an_old_driver_do(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("550.54.15", "13.0")
    monkeypatch.setenv("VLLM_ENABLE_CUDA_COMPATIBILITY", "1")
    assert devices.cuda_problem() is None


@pytest.mark.parametrize(
    ("modes", "ranks", "size", "free", "words"),
    [
        ("Default, Disabled", 8, 1, 2 << 30, []),
        ("Default, Disabled", 1, 1, 64 << 20, []),
        ("Default, Enabled", 1, 1, 2 << 30, []),
        ("Exclusive_Process, Disabled", 1, 1, 2 << 30, ["exclusive or prohibited compute mode"]),
        ("Default, Enabled", 2, 1, 2 << 30, ["MIG slices"]),
        ("Default, [N/A]", 8, 1, 64 << 20, ["/dev/shm has 64 MiB left"]),
        ("Default, [N/A]", 1, 2, 64 << 20, ["/dev/shm has 64 MiB left"]),
    ],
)
def test_obstacles_to_sharing_gpus_are_reported_before_anything_starts(
    machine: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modes: str,
    ranks: int,
    size: int,
    free: int,
    words: list[str],
) -> None:
    machine("580.65.06", "13.0")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/bash\n[ $2 = --format=csv,noheader ] && echo '{modes}'\n")
    smi.chmod(0o755)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    messages = device_problems(
        auto("cuda", tensor_parallel_size=size), LOCAL_WORLD_SIZE=str(ranks), WORLD_SIZE="8"
    )
    assert len(messages) == len(words) and all(
        word in line for word, line in zip(words, messages, strict=True)
    ), messages
    assert all(len(line) < 300 for line in messages)


def test_a_slice_named_in_cuda_visible_devices_is_for_one_rank(machine: Callable[..., None]) -> None:
    machine("580.65.06", "13.0")
    (message,) = device_problems(
        auto("cuda"), LOCAL_WORLD_SIZE="2", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="MIG-1,MIG-2"
    )
    assert "MIG slices" in message


def test_engines_get_full_uuids_even_if_the_user_abbreviates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes the beginning of a UUID; NVML, by which vLLM looks devices up, does not."""
    uuids = [f"GPU-{number}1ce4ab0-5ff3-7a31-ad7f-66b1dd6b2e0a" for number in range(3)]
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/bash\n[ $1 = --query-gpu=uuid ] && printf '%s\\n' " + " ".join(uuids) + "\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for visible_devices, indices, expected in (
        ("GPU-2,GPU-01ce", (0, 1), f"{uuids[2]},{uuids[0]}"),
        (f"{uuids[1]}, GPU-2", (1, 0), f"{uuids[2]},{uuids[1]}"),
        ("GPU-7,GPU-2", (0,), "GPU-7"),  # vLLM says that there is none
        ("3, 1", (1,), "1"),
        ("MIG-5", (0,), "MIG-5"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
        settings = EngineSettings(model="m", max_model_len=64, device_indices=indices)
        assert engine_environment(settings)["CUDA_VISIBLE_DEVICES"] == expected
    smi.unlink()
    assert devices.full_uuids(["GPU-2"]) == ["GPU-2"]


def test_an_allocator_without_ipc_is_refused_on_cuda(machine: Callable[..., None]) -> None:
    machine("580.65.06", "13.0")
    for setting in ("backend:cudaMallocAsync", "max_split_size_mb:64, backend: cudaMallocAsync"):
        (message,) = device_problems(auto("cuda"), PYTORCH_CUDA_ALLOC_CONF=setting)
        assert message.startswith(
            "PYTORCH_CUDA_ALLOC_CONF sets backend:cudaMallocAsync, whose memory has no CUDA IPC"
        )
    assert device_problems(auto("cuda"), PYTORCH_CUDA_ALLOC_CONF="backend:native") == []


def vllm_generation(model: str) -> None:
    config: Any = {
        "backend": "vllm",
        "model_name": model,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": [2],
        "vllm_cfg": {"max_model_len": 64},
    }
    VllmGeneration(config)


ENTRY_POINTS: dict[str, Callable[[str, Path], Any]] = {
    "hotbunk generate": lambda model, _: main(["generate", model, "--prompt", "1+1="]),
    "hotbunk serve": lambda model, _: main(["serve", model, "--port", "0"]),
    "hotbunk eval": lambda model, recipe: main(["eval", model, str(recipe)]),
    "VllmGeneration": lambda model, _: vllm_generation(model),
    "AsyncVLLM": lambda model, _: AsyncVLLM(EngineSettings(model=model, max_model_len=64)).start(),
    "VLLMModule": lambda model, _: VLLMModule(
        {"model": model, "seq_length": 64, "max_new_tokens": 8}
    ).setup(),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_no_entry_point_poisons_the_fork_of_an_engine_nor_forks_one(
    entry_point: str, tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry point calls `_cuda_getDeviceCount`, after which forked children cannot use CUDA."""
    started: list[EngineSettings] = []
    counted: list[str] = []

    def start(settings: EngineSettings, *_: Any) -> Any:
        started.append(settings)
        raise RuntimeError("started")

    monkeypatch.setattr("generation.engine.vllm_compat.start_async_llm", start)
    for name in ("install_signal_handlers", "start_guardian"):
        monkeypatch.setattr(processes, name, lambda *_, **__: None)
    monkeypatch.setattr(processes, "run", lambda job: job())
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\nreward: {{functions: [{{name: exact_match}}]}}\n")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if "vllm" in sys.modules:  # whose import sets it, once
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setattr(
        torch._C, "_cuda_getDeviceCount", lambda: counted.append(entry_point) or 1, raising=False
    )
    monkeypatch.setattr(devices, "gpu_visible", lambda: True)
    monkeypatch.setattr(devices, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "none")
    with suppress(RuntimeError, SystemExit):
        ENTRY_POINTS[entry_point](str(tiny_qwen2), recipe)
    (settings,) = started
    assert settings.device_indices == (0,)
    assert counted == []
    assert engine_environment(settings)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@contextmanager
def joined() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def on_third_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates CUDA as a thread sees it: initialised, on device 0 until the thread chooses another; this thread chose
    3.
    """
    local = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(local, "device", index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(local, "device", 0))
    torch.cuda.set_device(3)


def test_threads_that_may_touch_tensors_are_on_the_device_of_their_rank(
    on_third_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device_of_thread: dict[str, int] = {}

    def look(where: str) -> None:
        device_of_thread[where] = torch.cuda.current_device()

    def write(folder: Path, snapshot: checkpoint.Snapshot, group: object) -> None:
        look(f"checkpoint, {'in the background' if 'background' in snapshot.extra else 'waited for'}")

    async def on_the_loop() -> None:
        look("engine's loop")
        await call_user(lambda: look("user code"))

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(checkpoint, "random_states", dict)  # of a device that is not here
    unbound = threading.Thread(target=look, args=["a thread that nobody told"])
    unbound.start()
    unbound.join()
    with joined():
        for extra in ({}, {"background": 1}):
            writer = CheckpointWriter(tmp_path, CheckpointConfig(background=bool(extra)), 60)
            writer.save(1, {}, extra, {})
            writer.close()
    loop = EngineThread()
    loop.run(on_the_loop(), 60, "looking")
    loop.close()
    assert device_of_thread.pop("a thread that nobody told") == 0
    assert device_of_thread == dict.fromkeys(
        ["checkpoint, waited for", "checkpoint, in the background", "engine's loop", "user code"], 3
    )


def test_a_first_node_whose_name_means_loopback_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian writes a machine's own name into /etc/hosts like this; gloo on the other nodes would wait for it
    in vain.
    """
    several = {
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "first-node",
        "MASTER_PORT": "29500",
    }
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(distributed, "own_address", lambda *_: "127.0.0.1")
    with pytest.raises(
        UserError, match="MASTER_ADDR=first-node is this machine's loopback here"
    ) as caught:
        distributed._stay_private()
    assert len(str(caught.value)) < 300
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    distributed._stay_private()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("installed", "unfit"),
    [
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, ""),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0+cpu"}, ""),
        ({"torch": "2.13.0+cu130", "torchvision": "0.28.0"}, ""),
        ({"torch": "2.13.0+cpu"}, ""),
        (
            {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"},
            "torchvision torchaudio",
        ),
        ({"torch": "2.13.0+cpu", "torchaudio": "2.11.0"}, "torchaudio"),
        ({"torch": "2.13.0", "torchvision": "0.28.0+cpu"}, "torchvision"),
    ],
)
def test_a_torchvision_built_for_another_torch_is_refused_with_a_remedy(
    installed: dict[str, str], unfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(shims, "are_needed", lambda: False)
    if unfit:
        with pytest.raises(UserError, match=f"pip uninstall -y {unfit}$"):
            check_torch_libraries(version)
    else:
        check_torch_libraries(version)


def test_every_further_group_has_the_deadline_of_the_run(one_rank: None) -> None:
    """Otherwise a group of neighbours or of a mesh waits 30 minutes with gloo, 10 with NCCL."""
    groups = [
        dist.new_group([0]),
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")).get_group("a"),
    ]
    for group in groups:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
    assert distributed_c10d._get_default_timeout("nccl") == timedelta(seconds=60)
