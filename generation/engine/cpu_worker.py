"""vLLM's worker on a CPU, whose import decides which kernels the models of this process are built with."""

import os
from typing import Any

from torch import Tensor
from vllm import _custom_ops  # noqa: F401
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker import cpu_worker

from generation.engine.cpu_kernels import PLAIN, hide_instructions
from generation.engine.start_errors import reporting_start_errors

hide_instructions(plain=os.environ.get(PLAIN) == "1")

_rotate_by_kernel = RotaryEmbedding.forward_cpu


def rotate(layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    """Turn queries and keys by their positions, with vLLM's kernel where they are [tokens, heads * size].

    Of [tokens, heads, size], as LFM2 has them, the kernel turns other elements than it should.
    """
    turn = _rotate_by_kernel if query.dim() == 2 else RotaryEmbedding.forward_native
    return turn(layer, positions, query, key)


RotaryEmbedding.forward_cpu = rotate


@reporting_start_errors
class CPUWorker(cpu_worker.CPUWorker):
    """The worker of an engine on a CPU, which writes down what keeps it from starting."""
