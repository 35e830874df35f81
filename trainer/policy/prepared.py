"""A policy that Accelerate has prepared, for the user's own training loop that samples from an
engine.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from sharding.ranks import join_over_gloo
from sharding.send.source import FsdpWeightSource
from trainer.errors import UserError
from trainer.policy.buffers import sent_buffers
from trainer.policy.hf_format import checkpoint_views, parameter_names
from trainer.policy.offload import Offloadable


class PreparedPolicy(Offloadable):
    """A policy for `ShardingManager`, from the model and the optimizer that `Accelerator.prepare`
    returned.

    The model is a Transformers model under DDP, FSDP2 or DeepSpeed, or on one process. Its version
    is the number of optimizer steps since it was prepared, which a hook counts.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        offload: Literal["none", "optimizer", "all"] = "none",
    ) -> None:
        """Wrap model and optimizer; `offload` names the GPU memory that is put away while the
        engine is awake.

        Collective, since the ranks are joined over gloo where Accelerate has joined them over NCCL
        alone. Raises UserError for DeepSpeed with `offload`, since only DeepSpeed can move its
        buffers.
        """
        join_over_gloo()
        self._prepared = model
        self._steps = 0
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        # Accelerate wraps it
        self._inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._is_deepspeed = hasattr(model, "global_steps")
        if not self._is_deepspeed:
            self._inner.register_step_post_hook(self._count)
        elif offload != "none":
            raise UserError(
                "offload must be none with DeepSpeed: set offload_optimizer in its own configuration"
            )
        super().__init__(offload, self._state_tensors, self.model.parameters)

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        return (t for state in self._inner.state.values() for t in state.values() if torch.is_tensor(t))

    def _count(self, *_: object) -> None:
        self._steps += 1

    @property
    def version(self) -> int:
        """The number of optimizer steps so far."""
        return int(self._prepared.global_steps) if self._is_deepspeed else self._steps  # type: ignore[arg-type]

    def weight_source(self, dtype: torch.dtype) -> FsdpWeightSource:
        """Return the weights under their checkpoint names, to be sent in the engine's `dtype`."""
        buffers, uncast = sent_buffers(self.model)
        weights = [*parameter_names(self.model).items(), *buffers]
        return FsdpWeightSource(weights, dtype, partial(checkpoint_views, self.model), uncast)

    @torch.no_grad()
    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Return log-probabilities (nats, temperature 1) of `token_ids[1:]`. Collective: all ranks
        call it.
        """
        training = self._prepared.training
        self._prepared.eval()
        ids = torch.tensor([token_ids], device=next(self.model.parameters()).device)
        logprobs = self._prepared(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        self._prepared.train(training)
        scores: list[float] = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
        return scores
