"""A logits processor that changes nothing: it notes the prompt and the sampled ids of every request of the engine."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class Recorder(LogitsProcessor):
    """Writes all requests to ECOSYSTEM_REQUESTS when requests begin or end: pairs of lists of ids, in their order.

    vLLM extends the lists of sampled ids that it has passed (vllm/v1/sample/logits_processor/interface.py).
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._file = Path(os.environ["ECOSYSTEM_REQUESTS"])
        self._requests: list[tuple[list[int], list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        """Return True, since logits are not changed."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Record the requests that have begun."""
        if batch_update is not None:
            self._requests += [(list(prompt), sampled) for _, _, prompt, sampled in batch_update.added]
            self._file.write_text(json.dumps(self._requests))
