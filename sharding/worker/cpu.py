"""Replacements, in a worker on a CPU, for features of vLLM that exist only on CUDA. Weight updates
work without them.

`keep_weights_plain`: weights stay in the layout in which they are loaded, so that updates can write
them in place and read them back. vLLM packs them otherwise. Depending on the processor, it packs
those of linear layers for oneDNN, SGL's kernels or zentorch, and those of convolutions for a kernel
of its own (vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm). It packs those of
experts for another (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py,
process_weights_after_loading).

`choose_with_biases`: routers whose experts are not in groups choose by sigmoid scores and by
correction biases.

`RouteRecorder`: the experts that a mixture's routers have chosen for each token in this worker.
vLLM itself returns them only from its model runner V2, which CPUs do not have (0.32:
vllm/config/vllm.py, _verify_aux_output_compatibility). The recorder is for runner V1: routers
report their choices there as well, also on CPUs
(vllm/model_executor/layers/fused_moe/router/base_router.py, set_capture_fn).
"""

from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter


def keep_weights_plain() -> None:
    """Make models that are built from now on keep their weights in the layout in which they are
    loaded. Experts with activations that `PlainExperts` lacks stay packed.
    """
    utils.dispatch_cpu_unquantized_gemm = _compute_plain
    kernels = unquantized.backend_to_kernel_cls

    def plain_first(backend: unquantized.UnquantizedMoeBackend) -> list[Any]:
        plain = [PlainExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else []
        return [*plain, *kernels(backend)]

    unquantized.backend_to_kernel_cls = plain_first


def choose_with_biases() -> None:
    """Make routers whose experts are not in groups choose as if all experts were in one group,
    where scores are sigmoids or have biases.

    vLLM 0.32 refuses sigmoid scores at the first token, and ignores the biases of softmax scores
    without an error.
    """
    build = CPURouter.__init__

    @wraps(build)
    def with_one_group(router: CPURouter, *arguments: Any, **options: Any) -> None:
        build(router, *arguments, **options)
        left_out = router.scoring_func == "softmax" and router.e_score_correction_bias is not None
        grouped = router.use_grouped_topk or router.custom_routing_function is not None
        if not grouped and (left_out or router.scoring_func == "sigmoid"):
            router.use_grouped_topk = True
            router.num_expert_group = 1
            router.topk_group = 1

    CPURouter.__init__ = with_one_group  # type: ignore[method-assign]


def _compute_plain(layer: Any, remove_weight: bool) -> None:
    """Make a layer multiply by its weight in the layout in which it was loaded, as vLLM does where
    it has no special kernel.
    """
    layer.cpu_linear = linear


class PlainExperts(CPUUnquantizedExperts):
    """A mixture's experts as grouped matrix products over weights in the layout in which they are
    loaded. The activation is a gated SiLU, or the clamped one of gpt-oss.
    """

    keeps_weights = True

    @classmethod
    def _padded_intermediate_size(cls, moe_config: Any) -> int:
        return int(moe_config.intermediate_size_per_partition)

    @staticmethod
    def is_supported_config(cls: Any, moe_config: Any, *arguments: Any) -> tuple[bool, str | None]:
        """Return True and None if this kernel can compute the experts, else False and the reason.
        vLLM takes the first kernel of its list that can.
        """
        if moe_config.activation not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
            return False, "kernel computes gated SiLU only"
        if moe_config.moe_parallel_config.use_ep:
            return False, "kernel needs all experts"
        return CPUUnquantizedExperts.is_supported_config(cls, moe_config, *arguments)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing, where vLLM's kernels pack the weights."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """Write the weighted sums of each token's experts to `output` [tokens, hidden].

        `w1`: [experts, 2 × intermediate, hidden], gates and values in the order that `_gated`
        reads; `w2`: [experts, hidden, intermediate]; `topk_weights`, `topk_ids`: [tokens, k]. With
        `apply_router_weight_on_input`, `hidden_states` are already multiplied by the weights.
        """
        order = topk_ids.flatten().argsort()  # pairs of token and expert, sorted by expert
        ends = topk_ids.flatten().long().bincount(minlength=len(w1)).cumsum(0).int()
        experts = topk_ids.flatten()[order]
        gates = grouped_mm(hidden_states[order // topk_ids.shape[1]], w1.mT, offs=ends)
        gates = gates if self.w1_bias is None else gates + self.w1_bias[experts]
        rows = torch.empty(len(order), output.shape[-1], dtype=torch.float32)
        rows[order] = grouped_mm(_gated(gates, activation), w2.mT, offs=ends).float()
        if self.w2_bias is not None:
            rows[order] += self.w2_bias[experts]
        if not apply_router_weight_on_input:
            rows *= topk_weights.reshape(-1, 1)
        output.copy_(rows.view(*topk_ids.shape, -1).sum(dim=1))


def _gated(gates: Tensor, activation: MoEActivation) -> Tensor:
    """Return the activations [n, intermediate] of `gates` [n, 2 × intermediate], which holds the
    gates and the values that they gate.

    With SiLU, all gates come first. In gpt-oss gates and values alternate, and are clamped at 7;
    the constants are the defaults of Transformers' `GptOssConfig` (`swiglu_alpha` and
    `swiglu_limit`).
    """
    if activation == MoEActivation.SILU:
        gate, up = gates.chunk(2, dim=-1)
        return silu(gate) * up
    gate = gates[:, ::2].clamp(max=7.0)
    up = gates[:, 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


class RouteRecorder:
    """Records which experts a mixture's routers have chosen, in a row [layers, top_k] for each
    token of a running or recent request.

    A row is also kept at the token's slot of the KV cache. A request whose prompt's beginning is in
    the cache, or that continues after a preemption, does not compute these tokens again: their rows
    are those of the pass that computed their keys and values.
    """

    def __init__(self, runner: Any, model: torch.nn.Module) -> None:
        """Register with the model's routers. Raises ValueError if the model has none, or if they do
        not report their choices.
        """
        mixtures = [module for module in model.modules() if isinstance(module, MoERunner)]
        if not mixtures or not all(isinstance(mixture.router, BaseRouter) for mixture in mixtures):
            raise ValueError(
                f"{type(model).__name__} has no routers that tell their choices: set model.routes to own"
            )
        config = runner.model_config
        layers = config.get_total_num_hidden_layers()
        self.top_k = config.get_num_experts_per_tok()
        self.dtype = np.uint8 if config.get_num_experts() <= 256 else np.uint16
        self.format = [layers, self.top_k, np.dtype(self.dtype).name]
        self._layers = layers
        self._runner = runner
        self._chosen: dict[int, Tensor] = {}  # the experts chosen in the latest forward pass, by layer
        self._by_slot = np.zeros((0, layers, self.top_k), self.dtype)
        self._rows: dict[str, list[np.ndarray]] = {}
        for mixture in mixtures:
            mixture.router.set_capture_fn(partial(self._chosen.__setitem__, mixture.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model

    def clear(self) -> None:
        """Delete the rows of requests that `take` was not called for."""
        self._rows.clear()

    def take(self, request: str) -> bytes:
        """Remove and return the rows [tokens, layers, top_k], as bytes, of a request that has
        ended, by the id that it was submitted under; empty if there are none.
        """
        # vLLM adds eight characters to the id (vllm/v1/engine/input_processor.py,
        # assign_request_id).
        name = next((name for name in self._rows if name.rpartition("-")[0] == request), None)
        return b"" if name is None else np.concatenate(self._rows.pop(name)).tobytes()

    def _execute_model(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._chosen.clear()
        result = self._execute(scheduled, *arguments, **options)
        if scheduled.total_num_scheduled_tokens and self._chosen:
            self._keep(scheduled.num_scheduled_tokens)
        return result

    def _keep(self, scheduled: dict[str, int]) -> None:
        """Store the rows of a forward pass. `scheduled`: request -> the number of its tokens in the
        pass, which follow one another in the order of the batch.
        """
        batch = self._runner.input_batch
        total = sum(scheduled.values())
        rows = np.zeros((total, self._layers, self.top_k), self.dtype)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen[:total].numpy()
        table = batch.block_table[0]
        end = 0
        for row, name in enumerate(batch.req_ids):
            begin = end
            end = end + scheduled[name]
            start = int(batch.num_computed_tokens_cpu[row])
            positions = np.arange(start + end - begin)
            slots = (
                table.get_numpy_array()[row, positions // table.block_size].astype(np.int64)
                * table.block_size
            )
            slots += positions % table.block_size
            if len(self._by_slot) <= slots.max():
                more = np.zeros((int(slots.max()) + 1 - len(self._by_slot), *rows.shape[1:]), self.dtype)
                self._by_slot = np.concatenate([self._by_slot, more])
            self._by_slot[slots[start:]] = rows[begin:end]
            kept = self._rows.setdefault(name, [])
            if sum(map(len, kept)) != start:
                # The request is new or was preempted: its first tokens come from the KV cache.
                kept[:] = [self._by_slot[slots[:start]]]
            kept.append(rows[begin:end])
