"""Run the factories of `logits_processors` in vLLM's second model runner (CUDA), which imports this
module by name.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from generation.engine.logits import load_factories, processor_of


class FactoryProcessorV2(LogitsProcessor):
    """One chain of processors for each slot of the batch, made anew when a request takes the
    slot.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._factories = load_factories(vllm_config.additional_config)
        self._states = req_states
        self._chains: dict[int, Callable[[list[int], Any], Any] | None] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Make the processors of a request in place of the slot's former ones; return True if there
        are any.
        """
        self._chains[req_idx] = processor_of(self._factories, sampling_params)
        return self._chains[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Change the rows of the requests that have processors; ids are read from the device for
        these rows alone.
        """
        if not any(self._chains.get(int(slot)) for slot in ctx.idx_mapping_np):
            return logits
        slots = ctx.expanded_idx_mapping.tolist()
        ends = (ctx.pos + 1).tolist()
        for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            if chain := self._chains.get(slot):
                start = int(self._states.prompt_len.np[slot])
                output_ids = self._states.all_token_ids.gpu[slot, start:end].tolist()
                logits[row] = chain(output_ids, logits[row])
        return logits
