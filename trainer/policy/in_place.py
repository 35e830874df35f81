"""The policy of a single rank that computes with the engine's weights, so that none need to be
sent.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.policy import hf_format
from trainer.policy.fsdp import FsdpPolicy
from trainer.policy.hf_format import parameter_names
from trainer.policy.optimizer import MetricSums
from trainer.types import UpdateStats


class InPlacePolicy(FsdpPolicy):
    """A policy whose weights, in the compute dtype, may be in an engine's memory, with float32
    masters.

    It is always trainable, without adapters. Nothing is sharded: on one rank FSDP would copy every
    weight before each use. Gradients are summed over micro-batches in float32 and applied to the
    masters, as FSDP does, so the weights are the same bit for bit. With `policy.update_on: host`
    masters, gradients and optimizer state are in host memory: the device holds the engine's
    weights, and gradients until they have been copied.
    """

    def _birthplace(self, trainable: bool) -> torch.device:
        return self.home

    def _shard(self) -> None:
        self._fuse()
        self._replicas = 1

    @torch.no_grad()
    def _load(self, start: hf_format.StartValue) -> None:
        super()._load(start)
        # The trained parameters by name: in float32, on one device, they are the weights
        # themselves.
        self.masters: dict[str, nn.Parameter] = {}
        if self.module.value_head is not None:
            self.module.value_head.to(self.device)
        for weight in self.module.parameters():
            if not weight.requires_grad:
                weight.data = weight.detach().to(self.device, self.compute_dtype)
        for name, weight in super().trained().items():
            self.masters[name] = weight
            if self.compute_dtype != torch.float32 or self.home != self.device:
                self.masters[name] = nn.Parameter(weight.detach().to(self.home))
                weight.data = weight.detach().to(self.device, self.compute_dtype)
                weight.register_post_accumulate_grad_hook(partial(_accumulate, self.masters[name]))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the masters, which the optimizer updates and checkpoints contain."""
        return self.masters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters by name: their masters, or, if they are frozen, the weights
        themselves.
        """
        return (
            (name, self.masters.get(name, weight))
            for name, weight in parameter_names(self.model).items()
        )

    @torch.no_grad()
    def compute_in(self, memory: dict[str, Tensor]) -> None:
        """Move weights to this memory, name -> [n] in the compute dtype, where they stay from now
        on.

        Saved buffers stay where they are: nothing changes them, so the engine keeps what the first
        update brought.
        """
        for name, weight in parameter_names(self.model).items():
            if name not in memory:  # the engine keeps something else of it
                continue
            view = memory[name].view(weight.shape)
            view.copy_(weight)
            weight.data = view

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state that `state_dict` returned, of this or of a sharded policy of the same
        model.
        """
        super().load_state_dict(state)
        self._publish()

    def step(self, metrics: MetricSums, rate: float, max_norm: float) -> UpdateStats:
        """Apply the waiting gradients to the masters, and cast the weights from them."""
        stats = super().step(metrics, rate, max_norm)
        self._publish()
        return stats

    @torch.no_grad()
    def _publish(self) -> None:
        """Cast the masters into the weights that the model and an engine read: this is the weight
        sync.
        """
        if pairs := self._copies():
            weights, masters = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(weights, masters)

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs of weights and masters that are separate tensors."""
        return [
            (weight, self.masters[n])
            for n, weight in super().trained().items()
            if weight is not self.masters[n]
        ]

    def _weights(self) -> Iterator[Tensor]:
        return (master for _, master in self._copies())


def _accumulate(master: Tensor, weight: Tensor) -> None:
    """Add a weight's gradient to its master's, in float32 and where the master is, and free it."""
    assert weight.grad is not None
    # Rounded values are fewer bytes
    gradient = weight.grad.to(master.device).to(master.dtype)
    weight.grad = None
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
