"""On CPU: weights that stay as they are loaded, so that they can be written in place and read back.

By what the processor has, vLLM packs those of linear layers for oneDNN, SGL's kernels or zentorch, and those of
convolutions for a kernel of its own (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm); those of a
mixture's experts for another (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py, process_weights_after_loading).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized


def keep_weights_plain() -> None:
    """For models that this process builds from now on; experts with biases, or other activations, stay packed."""
    utils.dispatch_cpu_unquantized_gemm = _compute_plain
    kernels = unquantized.backend_to_kernel_cls

    def plain_first(backend: unquantized.UnquantizedMoeBackend) -> list[Any]:
        plain = [PlainExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else []
        return [*plain, *kernels(backend)]

    unquantized.backend_to_kernel_cls = plain_first


def _compute_plain(layer: Any, remove_weight: bool) -> None:
    """Have a layer computed from its weight as it is, as vLLM does where it has no kernel for it."""
    layer.cpu_linear = linear


class PlainExperts(CPUUnquantizedExperts):
    """Experts with gated SiLU by grouped products, in the layout of the checkpoint."""

    keeps_weights = True

    @classmethod
    def _padded_intermediate_size(cls, moe_config: Any) -> int:
        return int(moe_config.intermediate_size_per_partition)

    @staticmethod
    def is_supported_config(cls: Any, moe_config: Any, *others: Any) -> tuple[bool, str | None]:
        """vLLM takes the first kernel that is."""
        if moe_config.has_bias or moe_config.activation != MoEActivation.SILU:
            return False, "kernel computes gated SiLU without biases only"
        if moe_config.moe_parallel_config.use_ep:
            return False, "kernel needs all experts"
        return CPUUnquantizedExperts.is_supported_config(cls, moe_config, *others)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """They stay as they are."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """Write the weighted sums of each token's experts to `output` [tokens, hidden].

        `w1`: [experts, 2 × intermediate, hidden], gates before the rest; `w2`: [experts, hidden, intermediate];
        `topk_weights`, `topk_ids`: [tokens, k]; with `apply_router_weight_on_input` the states come weighted.
        """
        order = topk_ids.flatten().argsort()  # by expert: each a row of a token
        ends = topk_ids.flatten().long().bincount(minlength=len(w1)).cumsum(0).int()
        gate, up = grouped_mm(hidden_states[order // topk_ids.shape[1]], w1.mT, offs=ends).chunk(2, dim=-1)
        rows = torch.empty(len(order), output.shape[-1], dtype=torch.float32)
        rows[order] = grouped_mm(silu(gate) * up, w2.mT, offs=ends).float()
        if not apply_router_weight_on_input:
            rows *= topk_weights.reshape(-1, 1)
        output.copy_(rows.view(*topk_ids.shape, -1).sum(dim=1))
