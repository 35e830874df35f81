"""What the loop asks of a policy, whatever shards it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sharding.collectives import exchange
from sharding.source import partition
from trainer.batching import MicroBatch
from trainer.flops import Work


@dataclass
class Outputs:
    """What a model says of a micro-batch's targets, each [B, T-1] float32 and 0 where the loss mask is 0.

    Attributes:
        logprobs: of the targets, nats, at the sampling temperature.
        entropy: of the distribution that the target was drawn from, nats.
        values: expected return of the state in which the target was sampled; where a value head shares the trunk.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None


LossFn = Callable[[MicroBatch, Outputs], tuple[Tensor, dict[str, Tensor]]]
"""The batch's summed loss, already divided by the whole step's count, and figures to be summed over micro-batches and
ranks."""


@dataclass
class UpdateStats:
    """What one optimizer step did; the same on all ranks.

    Attributes:
        loss: of the whole step, all ranks.
        grad_norm: global L2 norm before clipping.
        learning_rate: the one the step used, or would have used.
        skipped: loss or gradient was not finite, so nothing was changed.
        sums: what the loss function returned, summed over micro-batches and ranks.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    sums: dict[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """A model that says how likely tokens are: a policy, or its reference."""

    @property
    def work(self) -> Work:
        """What it has computed so far on this rank; of one model with two names the same object."""

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch, without gradients. Collective."""


class Policy(Scorer, Protocol):
    """A language model, sharded over the ranks, that scores tokens and learns from them.

    Every method but the attributes is collective: all ranks call it, with equally many micro-batches.
    """

    device: torch.device
    model: PreTrainedModel

    @property
    def version(self) -> int:
        """How many updates were applied; skipped ones do not count."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters under the names they have in the Transformers model, tied ones once; sharded, as they are."""

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each of `token_ids[1:]`."""

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """One optimizer step on the sum of all batches' losses over all ranks.

        `place` is where the run is, for the learning rate: see `trainer.optimizer.learning_rate_factor`. None: as many
        updates were asked for as were applied.
        """

    def release(self, weights: bool) -> int:
        """Put away what policy.offload says: optimizer state, and the weights themselves if `weights`; returns bytes.

        Not collective. Until `restore` there is nothing else to ask of it, but what `weights=False` leaves.
        """

    def restore(self) -> None:
        """Everything in its place again."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors of model and optimizer, and counters, as torch.distributed.checkpoint wants them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""


@torch.no_grad()
def culprits(policy: Policy) -> str:
    """Which parameter is the first, in the model's order, to hold a NaN or an infinity, as a clause. Collective."""

    def held(parameter: Tensor) -> Tensor:
        if hasattr(parameter, "ds_tensor"):
            return partition(parameter)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    parameters = dict(policy.named_parameters())
    own = [name for name, parameter in parameters.items() if not torch.isfinite(held(parameter)).all()]
    bad = set().union(*exchange(own))
    if not bad:
        return "all parameters of the policy are finite: look at the engine's dtype, kernels and logits processors"
    first = next(name for name in parameters if name in bad)
    count = f" (the first of {len(bad)})" if len(bad) > 1 else ""
    return f"the policy's parameter {first}{count} holds values that are not finite"
