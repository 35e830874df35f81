"""Types that the trainer's packages share: samples, micro-batches, and the interface of a
policy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sharding.ranks import exchange
from sharding.send.source import local_part
from trainer.model_structure import Work

if TYPE_CHECKING:
    from generation.images import Image


@dataclass(frozen=True)
class RouteFormat:
    """The format of a mixture's routes: [tokens, layers, top_k] expert numbers, which differ within
    a layer.
    """

    layers: tuple[int, ...]  # the numbers of the decoder layers that have experts, ascending
    experts: int  # number of experts of a layer
    top_k: int  # number of experts that a token is sent to

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an expert's number."""
        return torch.uint8 if self.experts <= 256 else torch.uint16

    @property
    def row_bytes(self) -> int:
        """The size of a token's row in bytes."""
        return len(self.layers) * self.top_k * self.dtype.itemsize


@dataclass
class Sample:
    """One sequence to train on, prompt and response together; its lists have one entry for each
    token.
    """

    input_ids: list[int]  # prompt and response ids; at least one
    # 1 where the policy sampled the token, 0 elsewhere, so 0 on the whole prompt; by position, not
    # by id
    loss_mask: list[int]
    # Nats, under the distribution the token was sampled from; 0.0 where loss_mask is 0
    engine_logprobs: list[float]
    # In `RouteFormat`, for every token except the last, which predicts nothing
    routes: Tensor | None = None
    # Policy updates since each token was sampled; empty: all 0
    ages: list[int] = field(default_factory=list)
    images: "tuple[Image, ...]" = ()  # in the order of their placeholder tokens
    # Each image's first placeholder token, and their number
    image_spans: tuple[tuple[int, int], ...] = ()

    @property
    def trainable(self) -> int:
        """The number of tokens to learn. The first token never counts, since no token predicts
        it.
        """
        return sum(self.loss_mask[1:])

    def __post_init__(self) -> None:
        if not len(self.input_ids) == len(self.loss_mask) == len(self.engine_logprobs) > 0:
            raise ValueError(
                f"a sample needs equally many ids ({len(self.input_ids)}), mask entries "
                f"({len(self.loss_mask)}) and log-probabilities ({len(self.engine_logprobs)}), and at "
                "least one of each"
            )


class PrefixNode(NamedTuple):
    """A run of tokens in a trie of sequences: with those of its ancestors, a beginning that they
    have in common.
    """

    row: int  # a sequence that has the tokens
    begin: int  # the position of the first of them in the sequence
    end: int  # the position after the last
    parent: int  # the index of the node with the tokens before; -1: there are none
    rows: int  # number of sequences that have the tokens


Trie = tuple[list[PrefixNode], list[int]]
"""The nodes of a trie, in depth-first order, and the number of each sequence's last node; -1: it
has none.
"""


@dataclass(frozen=True)
class PrefixTree:
    """The paths of S nodes, each of which attends to the tokens of its ancestors and its own: L
    tokens in all.
    """

    # For each path, from the root, the ranges of its tokens among those of a pack
    ranges: list[list[tuple[int, int]]]
    lengths: list[int]  # the number of tokens of each path
    starts: Tensor  # [S+1] int32, the index among the L tokens at which each path begins, and L
    trie: Trie  # the nodes, and the sequences' last ones
    logical_tokens: int  # the tokens of all sequences, as if none were shared; at least one for each


@dataclass(frozen=True)
class Pack:
    """S sequences laid end to end, N tokens in all; each lacks its last token, which predicts
    nothing.

    With a `tree`, the S sequences are its nodes, so a beginning that several samples have in common
    is there once.

    Ranks that share a micro-batch (`policy.sequence_parallel`) have consecutive parts of the N
    tokens; this rank has M.
    """

    tokens: Tensor  # [M] int64, the indices of this rank's tokens in `MicroBatch.input_ids`, flattened
    positions: Tensor  # [M] int64, the position of each of these tokens in its sequence, from 0
    starts: Tensor  # [S+1] int32, the index at which each sequence begins, and N
    lengths: list[int]  # the number of tokens of each sequence in the pack
    parts: list[int]  # the number of tokens of each rank that shares the pack; [N] if no rank shares it
    begin: int = 0  # the index among the N tokens of this rank's first token
    tree: PrefixTree | None = None  # None: the sequences are whole, and each attends to itself alone

    def local(self, values: Tensor) -> Tensor:
        """Return the rows [M, ...] of this rank's tokens from the rows [N, ...] of all tokens."""
        return values[self.begin : self.begin + len(self.tokens)]


@dataclass(frozen=True)
class Layout:
    """The indices of a micro-batch's K targets, computed on the host so that a pass never waits for
    the device.

    Example: a loss mask [[0, 1, 0], [0, 1, 1]] has targets [1, 4, 5]. Without packing, `states` is
    equal to it. With packing and lengths [3, 4], the sequences without their last tokens have 2 and
    3 tokens, and states are [1, 3, 4].
    """

    # [K] int64, ascending: the indices in [B, T-1], flattened, at which the loss mask is 1. If
    # ranks share the micro-batch, each rank has the targets that its own tokens predict, so each
    # target is on exactly one rank
    targets: Tensor
    # [K] int64, the indices of the hidden states that predict them, in the model's input, flattened
    states: Tensor
    pack: Pack | None = None  # the model's input; None: `input_ids[:, :-1]`


@dataclass(frozen=True)
class ImageSpan:
    """The placeholder tokens of an image in a micro-batch."""

    image: "Image"
    row: int
    start: int  # column of the first placeholder token
    length: int  # number of placeholder tokens


@dataclass
class MicroBatch:
    """B right-padded sequences of T positions; tensors about targets have T - 1 columns, as
    `input_ids[:, 1:]`.

    There is no attention mask: with padding on the right and causal attention no real token attends
    to padding, and the loss ignores padding positions. Where the loss mask is 0, tensors may hold
    any value, including inf and NaN: select by the mask, do not multiply with it.
    """

    input_ids: Tensor  # [B, T] int64, T >= 2
    loss_mask: Tensor  # [B, T-1] float32
    engine_logprobs: Tensor  # [B, T-1] float32, nats
    advantages: Tensor  # [B, T-1] float32
    lengths: list[int]  # each sequence's number of tokens without padding, 1 to T
    layout: Layout  # the targets' indices, and the packed input of the model, if any
    # Each sequence's index in the list of samples; empty in a micro-batch that has no weight
    rows: list[int] = field(default_factory=list)
    # [B, T-1] float32, by the policy at the step's start; None until computed
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None  # [B, T-1] float32, by the reference policy; None until computed
    high_entropy: Tensor | None = None  # [B, T-1] bool, the tokens in the policy loss; None: all
    # [B, T-1] float32, by the critic at the step's start; None until computed
    old_values: Tensor | None = None
    returns: Tensor | None = None  # [B, T-1] float32, the critic's targets
    # In `RouteFormat`, for the tokens of the model's input, on the host; None: the mixture's
    # routers decide
    routes: Tensor | None = None
    ages: Tensor | None = None  # [B, T-1] uint8, updates since the token was sampled; None: all 0
    images: list[ImageSpan] = field(default_factory=list)  # in the order of their placeholder tokens
    # [B, T-1] int64, the tokens whose log-probabilities are computed; None: `input_ids[:, 1:]`
    targets: Tensor | None = None
    # [B, T-1] float32, each token's weight in a loss of `trainer.training`; None in a recipe's run
    weights: Tensor | None = None

    @property
    def ways(self) -> int:
        """The number of ranks that share this micro-batch."""
        return len(self.layout.pack.parts) if self.layout.pack is not None else 1

    @property
    def counts(self) -> bool:
        """True on the one rank that counts this batch's loss and metrics: the first of the ranks
        that share it.
        """
        return self.layout.pack is None or self.layout.pack.begin == 0

    def trained(self, values: Tensor) -> Tensor:
        """Return the values [K] of this rank's targets from `values` [B, T-1]."""
        return values.flatten().index_select(0, self.layout.targets)

    def spread(self, values: Tensor) -> Tensor:
        """Return a tensor [B, T-1] with the values [K] at this rank's targets and 0 elsewhere."""
        zeros = values.new_zeros(self.loss_mask.numel())
        return zeros.index_copy(0, self.layout.targets, values).view_as(self.loss_mask)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Return a copy with all tensors on a device except `routes`, which stay on the host
        between passes.
        """
        moved = cast(MicroBatch, _moved(self, device))
        return replace(moved, routes=self.routes)


def _moved(value: Any, device: torch.device | str) -> Any:
    """Copy a tensor, or a dataclass with the tensors and dataclasses in it, to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, Layout | Pack | PrefixTree | MicroBatch):
        return value
    return replace(
        value, **{item.name: _moved(getattr(value, item.name), device) for item in fields(value)}
    )


@dataclass
class Outputs:
    """A model's outputs for a micro-batch's targets: tensors [B, T-1] float32, 0 where the loss
    mask is 0.
    """

    logprobs: Tensor  # log-probabilities of the targets at the sampling temperature, nats
    entropy: Tensor  # entropy of the distribution that each target was sampled from, nats
    # Expected return of the state in which the target was sampled; None without a value head on
    # this trunk
    values: Tensor | None = None
    routes: Tensor | None = None  # as `MicroBatch.routes`; None unless they are recorded


LossFn = Callable[[MicroBatch, Outputs], tuple[Tensor, dict[str, Tensor]]]
"""A loss function: (batch, outputs) -> the batch's summed loss, already divided by the count of the
entire step, and metrics, which the caller sums over micro-batches and ranks.
"""


@dataclass
class UpdateStats:
    """The result of one optimizer step, equal on all ranks."""

    loss: float  # summed over micro-batches and ranks
    grad_norm: float  # global L2 norm before clipping
    learning_rate: float  # the learning rate of the step, even if it was skipped
    skipped: bool  # True if loss or gradient was not finite, so that no weight was changed
    # The loss function's metrics, summed over micro-batches and ranks
    sums: dict[str, float] = field(default_factory=dict)


class Routers(Protocol):
    """The routers of a mixture of experts."""

    format: RouteFormat
    # [layers, experts] float32, the weights of a token's probabilities in the balance loss
    pull: Tensor | None

    def take_counts(self) -> tuple[Tensor, int, float]:
        """Return and reset the counts of the passes since the last call.

        Returns the number of tokens of each expert ([layers, experts] int64, on the host); the
        number of tokens, summed over layers, that the router itself would have sent to other
        experts; and the balance loss.
        """


class Scorer(Protocol):
    """A model that computes log-probabilities of tokens: a policy or its reference."""

    @property
    def work(self) -> Work:
        """The counter of the model's work on this rank; scorers that share a model share the
        object.
        """

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """Return the outputs for each batch, without gradients. Collective."""


class Policy(Scorer, Protocol):
    """A language model, sharded over the ranks, that scores tokens and learns from them.

    Every method is collective unless it says otherwise: all ranks call it, with equally many
    micro-batches.
    """

    device: torch.device
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    # None for a dense model, and for a mixture of an unsupported architecture
    routing: Routers | None = None

    @property
    def version(self) -> int:
        """The number of updates applied; skipped updates do not count."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sharded parameters under their names in the Transformers model, tied parameters
        once.
        """

    def shard_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors backed by this rank's shards, whose storage can be swapped."""

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability (nats, temperature 1) of each of `token_ids[1:]`, as the
        sync's probe.
        """
        ones = torch.ones(1, len(token_ids) - 1)
        zeros = torch.zeros_like(ones)
        indices = torch.arange(len(token_ids) - 1)
        batch = MicroBatch(
            torch.tensor([token_ids]),
            ones,
            engine_logprobs=zeros,
            advantages=zeros,
            lengths=[len(token_ids)],
            layout=Layout(indices, indices),
        )
        return self.score([batch.to(self.device)], temperature=1.0)[0].logprobs[0].tolist()

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """Take one optimizer step on the sum of all losses over micro-batches and ranks.

        All ranks skip the step if the loss or the gradient is not finite. `place` is the run's
        progress, which determines the learning rate: see `optimizer.learning_rate_factor`. None:
        the progress is the number of updates applied. Raises TrainingDiverged on all ranks when the
        last `policy.max_skipped_steps` updates were skipped.
        """

    def release(self, weights: bool) -> int:
        """Offload what policy.offload names: the optimizer's state, and the weights if `weights`.
        Return the bytes.

        Not collective. Until `restore`, only methods that need nothing but the remaining weights
        may be called.
        """

    def restore(self) -> None:
        """Bring everything that `release` has offloaded back."""

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and counters as sharded tensors, in the form of
        torch.distributed.checkpoint.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""


@torch.no_grad()
def culprits(policy: Policy) -> str:
    """Return a clause that names the first parameter, in the model's order, with a NaN or infinity.
    Collective.
    """
    parameters = dict(policy.named_parameters())
    names = [
        name for name, parameter in parameters.items() if not torch.isfinite(local_part(parameter)).all()
    ]
    bad = set().union(*exchange(names))
    if not bad:
        return (
            "all parameters of the policy are finite: look at the engine's dtype, kernels and logits "
            "processors"
        )
    first = next(name for name in parameters if name in bad)
    count = f" (the first of {len(bad)})" if len(bad) > 1 else ""
    return f"the policy's parameter {first}{count} holds values that are not finite"
