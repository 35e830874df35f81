"""Everything that a run on a GPU imports, can be imported: what is missing else shows after minutes of loading."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

import generation
import sharding
import trainer

ENTRY = [
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.entrypoints.launchers.app",
    *(
        f"vllm.model_executor.models.{family}"
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3")
    ),
    *(
        f"vllm.v1.attention.backends.{backend}"
        for backend in ("flash_attn", "flashinfer", "triton_attn")
    ),
    "vllm.lora.worker_manager",
    "deepspeed",
    "peft",
    "ray",
    "trl",
]

# Imported inside functions, for the hardware or the models named, none of which is what this build is for.
ELSEWHERE = ("rocm", "xpu", "tpu", "aiter", "cpu")

# Named by the library they need, which the lock leaves out, run in a Python of its own, or a stand-in for what is installed.
LEFT_OUT = ("openenv", "reasoning_gym", "textarena", "verifiers_agent", "shims.torchvision")


def own_modules() -> list[str]:
    packages = (trainer, generation, sharding)
    return [
        module.name
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(("__main__", *LEFT_OUT))
    ]


def imported_in_functions(module: str) -> Iterator[str]:
    """Modules that functions of a module import when they are called, unless they are ready for their absence."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(Path(spec.origin).read_text()), False)]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.Try) and any(
            "ImportError" in ast.dump(handler) for handler in node.handlers
        ):
            continue
        if inside and isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if inside and isinstance(node, ast.ImportFrom):
            yield resolve_name("." * node.level + (node.module or ""), spec.parent or "")
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]


@pytest.mark.parametrize("module", [*ENTRY, *own_modules()])
def test_a_module_of_a_run_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def test_this_machine_is_taken_for_one_with_nvidia_gpus() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    assert current_platform.get_device_name().startswith("NVIDIA H100")


WARM_UP = ["vllm.v1.worker.gpu_worker", "vllm.model_executor.warmup.kernel_warmup"]


def warm_up_imports() -> list[str]:
    named = {name for module in WARM_UP for name in imported_in_functions(module)}
    return sorted(name for name in named if not any(word in name for word in ELSEWHERE))


@pytest.mark.parametrize("module", warm_up_imports())
def test_modules_that_a_warm_up_imports_late_can_be_imported(module: str) -> None:
    importlib.import_module(module)
