"""Make vLLM choose the same CPU kernels whether or not the processor has Intel's AMX.

vLLM asks torch for the processor's instruction sets in some thirty places. Where torch reports AMX,
it chooses kernels that pack the weights of small layers, refuse float32 in latent attention,
compute an answer's bits from the batch it is in, and end a process that was forked before it had
asked Linux for AMX's registers (docs/vllm-notes.md lists them). The code that makes vLLM's
configuration and the code that computes must see the same instruction sets: `start_async_llm` hides
AMX while it makes the configuration, and `generation.engine.cpu_worker` hides it for good, before
there is a model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLAIN = "HOTBUNK_PLAIN_CPU_WEIGHTS"
"""Environment variable of an engine's processes: "1" if weights keep the layout in which they are
loaded.
"""

_ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def kernel_environment(plain: bool) -> dict[str, str]:
    """Return environment variables for an engine's processes on a CPU; the user's values for oneDNN
    are kept.

    Both copies of oneDNN, torch's and vLLM's, choose their instruction set by themselves when they
    are first used (https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html).
    """
    return {PLAIN: str(int(plain))} | {
        name: os.environ.get(name, value) for name, value in _ONEDNN.items()
    }


def hide_instructions(plain: bool) -> dict[str, Any]:
    """Make torch report no AMX in this process; return the functions of `torch.cpu` that were
    replaced.

    With `plain`, torch reports no bfloat16 instructions either, for which vLLM packs convolutions
    (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm). Call it after
    `vllm._custom_ops` was imported: this import asks the same functions which library of kernels to
    load.
    """
    import torch

    capabilities = dict(torch.cpu.get_capabilities())
    replacements: dict[str, Any] = {"_is_amx_tile_supported": _no, "_is_amx_fp16_supported": _no}
    if plain:
        replacements |= {
            "_is_avx512_bf16_supported": _no,
            "get_capabilities": lambda: capabilities | {"bf16": False},
        }
    replaced = {name: getattr(torch.cpu, name) for name in replacements}
    vars(torch.cpu).update(replacements)
    return replaced


@contextmanager
def hidden_instructions(plain: bool) -> Iterator[None]:
    """Hide instruction sets as `hide_instructions` does, until the end of the block."""
    import torch

    replaced = hide_instructions(plain)
    try:
        yield
    finally:
        vars(torch.cpu).update(replaced)


def _no() -> bool:
    return False
