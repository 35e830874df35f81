"""Run the factories of `logits_processors` in vLLM's first model runner (CPU), which imports this
module by name.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from generation.engine.logits import load_factories, processor_of


class FactoryProcessorV1(AdapterLogitsProcessor):
    """One chain of processors for each request, in the order in which the recipe names them."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._factories = load_factories(vllm_config.additional_config)

    def is_argmax_invariant(self) -> bool:
        """Return False: a factory's processor may change the largest logit, so greedy sampling must
        apply it, too.
        """
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Return the processors of one request, as one; None if no factory makes one."""
        return processor_of(self._factories, params)
