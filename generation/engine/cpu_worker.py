"""vLLM's worker on a CPU, whose import decides which kernels the models of this process are built with."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm import _custom_ops  # noqa: F401
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker import cpu_worker

from generation.engine.cpu_kernels import PLAIN, START_ERROR, hide_instructions

hide_instructions(plain=os.environ.get(PLAIN) == "1")

_rotate_by_kernel = RotaryEmbedding.forward_cpu


def rotate(layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    """Turn queries and keys by their positions, with vLLM's kernel where they are [tokens, heads * size].

    Of [tokens, heads, size], as LFM2 has them, the kernel turns other elements than it should.
    """
    turn = _rotate_by_kernel if query.dim() == 2 else RotaryEmbedding.forward_native
    return turn(layer, positions, query, key)


RotaryEmbedding.forward_cpu = rotate

_START = (
    "init_device", "load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model",
)  # fmt: skip


class CPUWorker(cpu_worker.CPUWorker):
    """The worker, which writes what keeps it from starting to the file that `START_ERROR` names, and then ends.

    vLLM itself would say only that its core failed, below two tracebacks of forty lines; it does so where its log is
    set to INFO or DEBUG.
    """


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, changed to write down its error and end the process."""

    @wraps(method)
    def reporting(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            if (file := os.environ.get(START_ERROR)) is None or os.environ.get("VLLM_LOGGING_LEVEL") != "ERROR":
                raise
            Path(file).write_text(f"{type(error).__name__}: {error}", "utf-8")
            os._exit(1)

    return reporting


for _name in _START:
    setattr(CPUWorker, _name, _reporting(getattr(CPUWorker, _name)))
