"""vLLM's worker on a CPU, whose import decides which kernels the models of this process are built
with.
"""

import os
from typing import Any

from torch import Tensor
from torch.nn.functional import pad, softplus
from vllm import _custom_ops  # noqa: F401
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.worker import cpu_worker

from generation.engine.cpu_kernels import PLAIN, hide_instructions
from generation.engine.start_errors import reporting_start_errors

hide_instructions(plain=os.environ.get(PLAIN) == "1")

_rotate_by_kernel = RotaryEmbedding.forward_cpu


def rotate(layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    """Turn queries and keys by their positions, with vLLM's kernel where they are [tokens, heads *
    size].

    Of [tokens, heads, size], as LFM2 has them, the kernel turns other elements than it should.
    """
    turn = _rotate_by_kernel if query.dim() == 2 else RotaryEmbedding.forward_native
    return turn(layer, positions, query, key)


RotaryEmbedding.forward_cpu = rotate

_scan_by_kernel = ssd_combined._mamba_chunk_scan_combined_fwd


def scan(
    x: Tensor,  # [tokens, heads, size]
    dt: Tensor,  # [tokens, heads]
    *tensors: Any,
    dt_bias: Tensor | None = None,  # [heads]
    dt_softplus: bool = False,
    **options: Any,
) -> Any:
    """Scan prompts with vLLM's kernel. The states do not depend on a prompt's place in the batch.

    With the time steps as they come, they would: torch computes softplus of a tensor's last few
    elements, fewer than a vector register holds, by another function than that of the others.
    """
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if dt_softplus:
        steps = softplus(pad(steps, (0, 0, 0, 64)))[: len(steps)]
    return _scan_by_kernel(x, steps, *tensors, **options)


ssd_combined._mamba_chunk_scan_combined_fwd = scan


@reporting_start_errors
class CPUWorker(cpu_worker.CPUWorker):
    """The worker of an engine on a CPU, which writes down what keeps it from starting."""
