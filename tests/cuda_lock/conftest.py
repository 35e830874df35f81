"""Make vLLM's CUDA build take this machine for one with eight H100s: import and configurations, and nothing further.

Run by scripts/check_cuda_lock.sh in an environment made from the CUDA lock, where an empty `libcuda.so.1` lies on
LD_LIBRARY_PATH; not among the tests that run by default. NVML is what vLLM asks about devices, and Triton its driver.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MEMORY = 80 << 30
# As in `pytest tests` of a plain clone
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


class Nvml(importlib.abc.MetaPathFinder):
    """Lets vLLM's copy of pynvml be imported, and answers in its place."""

    NAME = "vllm.third_party.pynvml"

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function, answer in self.answers().items():
                assert hasattr(module, function), f"pynvml has no {function} any more"
                setattr(module, function, answer)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def answers(self) -> dict[str, Any]:
        return {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 8,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda _: 0,
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetName": lambda _: "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=MEMORY, free=MEMORY, used=0),
            "nvmlDeviceGetP2PStatus": lambda *_: 0,
        }


def pytest_configure() -> None:
    """Before anything imports vLLM."""
    if collect_ignore_glob:
        return
    if "vllm" in sys.modules:
        pytest.exit("vLLM was imported before it could be told of GPUs", 2)
    import triton.backends

    sys.meta_path.insert(0, Nvml())
    for name, backend in triton.backends.backends.items():
        backend.driver.is_active = staticmethod(lambda nvidia=name == "nvidia": nvidia)
    # kernels' libraries want symbols of the driver when called
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
