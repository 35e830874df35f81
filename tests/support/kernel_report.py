"""A worker extension that reports what its vLLM sees of the processor, and which kernel computes each layer."""

from typing import Any

import torch

from sharding.worker.extension import VllmInternalWorkerExtension

ASKED = ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported")


class KernelReport(VllmInternalWorkerExtension):
    """Adds a report of the processor and of kernels to the worker."""

    def hotbunk_kernels(self) -> dict[str, Any]:
        """Return `processor`, the features that vLLM sees, and `layers`, the kernel of each layer once it has one."""
        model = self.get_model()  # type: ignore[attr-defined]
        layers = {
            name: kernel for name, module in model.named_modules() if (kernel := kernel_of(module))
        }
        processor = {name: getattr(torch.cpu, name)() for name in ASKED}
        return {
            "processor": processor | {"bf16": torch.cpu.get_capabilities().get("bf16", False)},
            "layers": layers,
        }


def kernel_of(module: Any) -> str | None:
    """Name the kernel that computes a module, or return None for a module without one."""
    if hasattr(module, "cpu_linear"):
        linear = module.cpu_linear is torch.nn.functional.linear and module.weight.numel() > 0
        return "torch" if linear else "packed"
    if (experts := getattr(getattr(module, "quant_method", None), "experts_cls", None)) is not None:
        return str(experts.__name__)
    if (attention := getattr(module, "impl", None)) is not None:
        return f"{type(attention).__name__} {getattr(module, 'isa', '')}".strip()
    return None
