"""The types that the rooms of the trainer share: samples, micro-batches, and what the loop asks of a policy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

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
    """The routes of a mixture of experts: rows [tokens, layers, top_k] of experts' numbers, none twice in a layer."""

    layers: tuple[int, ...]  # the numbers of the decoder layers that have experts, ascending
    experts: int  # of each layer
    top_k: int  # how many of them a token is sent to

    @property
    def dtype(self) -> torch.dtype:
        """Of an expert's number."""
        return torch.uint8 if self.experts <= 256 else torch.uint16

    @property
    def row_bytes(self) -> int:
        """The bytes of a token's row."""
        return len(self.layers) * self.top_k * self.dtype.itemsize


@dataclass
class Sample:
    """One sequence to train on, prompt and response together; the four lists are equally long."""

    input_ids: list[int]  # prompt and response ids; at least one
    # 1 where the policy sampled the token, 0 elsewhere, so 0 on the whole prompt; by position, not by id
    loss_mask: list[int]
    engine_logprobs: list[float]  # nats, under the distribution the token was sampled from; 0.0 where loss_mask is 0
    routes: Tensor | None = None  # by `RouteFormat`, of every token but the last, which predicts nothing
    ages: list[int] = field(default_factory=list)  # updates of the policy since each was sampled; empty: none since any
    images: "tuple[Image, ...]" = ()  # in the order of the tokens that stand for them
    image_spans: tuple[tuple[int, int], ...] = ()  # of each the first of those tokens, and their number

    @property
    def trainable(self) -> int:
        """The number of tokens to learn. The first is not among them, whatever its mask: nothing comes before it."""
        return sum(self.loss_mask[1:])

    def __post_init__(self) -> None:
        if not len(self.input_ids) == len(self.loss_mask) == len(self.engine_logprobs) > 0:
            raise ValueError(
                f"a sample needs equally many ids ({len(self.input_ids)}), mask entries ({len(self.loss_mask)}) and "
                f"log-probabilities ({len(self.engine_logprobs)}), and at least one of each"
            )


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, each without its last token, which predicts nothing; N tokens of S sequences.

    Ranks that share a micro-batch (`policy.sequence_parallel`) have consecutive parts of the N tokens.
    """

    tokens: Tensor  # [M] int64, of this rank's tokens the indices in `MicroBatch.input_ids`, flattened
    positions: Tensor  # [M] int64, each of them its position in its sequence, from 0
    starts: Tensor  # [S+1] int32, the index at which each sequence begins, and N
    lengths: list[int]  # the number of tokens of each sequence in the pack
    parts: list[int]  # the number of tokens on each rank that shares them; one, N, where none does
    begin: int = 0  # the index in N of this rank's first

    def own(self, values: Tensor) -> Tensor:
        """The rows [M, ...] of this rank's tokens, from those of all [N, ...]."""
        return values[self.begin : self.begin + len(self.tokens)]


@dataclass(frozen=True)
class Layout:
    """The indices of a micro-batch's K targets, found on the host, so that a pass over it never waits for the device.

    Example: a loss mask [[0, 1, 0], [0, 1, 1]] has targets [1, 4, 5]; not packed, states are the same. Packed, with
    lengths [3, 4], the sequences are 2 and 3 tokens long without their last, and states are [1, 3, 4].
    """

    # [K] int64, the indices in [B, T-1], flattened, at which the loss mask is 1; ascending. Of ranks that share a
    # micro-batch each has those that its own tokens predict: together they are all, and none is twice
    targets: Tensor
    states: Tensor  # [K] int64, the indices of the hidden states that predict them, in the model's input, flattened
    pack: Pack | None = None  # the model's input; None: `input_ids[:, :-1]`

    @classmethod
    def of(cls, loss_mask: Tensor, lengths: list[int], packed: bool = False, ways: int = 1, place: int = 0) -> "Layout":
        """The layout for a mask [B, T-1] that is on the host; packed, on number `place` of the `ways` ranks that share.

        Example: of the 5 tokens above the first of 2 ranks has 2 and target 1; the other 3, targets [4, 5] and states
        [1, 2].
        """
        width = loss_mask.shape[1]
        targets = loss_mask.flatten().nonzero().squeeze(1)
        if not packed:
            return cls(targets, targets)
        sizes = [max(1, length - 1) for length in lengths]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        rows, columns = targets // width, targets % width
        positions = torch.cat([torch.arange(size) for size in sizes])
        tokens = positions + torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * (width + 1)
        missing = ways - len(tokens)
        if missing > 0:  # Transformers' modules need a token: a sequence that nothing is read of
            sizes, starts = [*sizes, missing], torch.cat([starts, starts[-1:] + missing])
            tokens = torch.cat([tokens, tokens.new_zeros(missing)])
            positions = torch.cat([positions, torch.arange(missing)])
        ends = [len(tokens) * part // ways for part in range(ways + 1)]
        parts, mine = [end - begin for begin, end in pairwise(ends)], slice(ends[place], ends[place + 1])
        states = starts[rows] + columns
        here = (states >= mine.start) & (states < mine.stop)
        pack = Pack(tokens[mine], positions[mine], starts.int(), sizes, parts, mine.start)
        return cls(targets[here], states[here] - mine.start, pack)


@dataclass(frozen=True)
class ImagePlace:
    """The place of an image in a micro-batch: the tokens that stand for it."""

    image: "Image"
    row: int
    start: int  # the first of them in its row
    length: int  # their number


@dataclass
class MicroBatch:
    """B right-padded sequences of T positions; tensors about targets have T - 1 columns, as `input_ids[:, 1:]`.

    There is no attention mask: with padding on the right and causal attention no real token sees a padding token, and
    the loss leaves padding positions out. Where the loss mask is 0, tensors may hold anything, inf and NaN included:
    code that reads one selects by the mask and does not multiply with it.
    """

    input_ids: Tensor  # [B, T] int64, T >= 2
    loss_mask: Tensor  # [B, T-1] float32
    engine_logprobs: Tensor  # [B, T-1] float32, nats
    advantages: Tensor  # [B, T-1] float32
    lengths: list[int]  # each sequence's number of tokens without padding, 1 to T
    # the targets' indices and the model's input: the real tokens alone, laid end to end, or with padding
    layout: Layout
    # each sequence's position in the list of samples; empty in a zero-weight micro-batch
    rows: list[int] = field(default_factory=list)
    old_logprobs: Tensor | None = None  # [B, T-1] float32 of the policy the step began with, once computed
    ref_logprobs: Tensor | None = None  # [B, T-1] float32 of the reference policy, once computed
    high_entropy: Tensor | None = None  # [B, T-1] bool, the tokens in the policy loss; None: all
    old_values: Tensor | None = None  # [B, T-1] float32 of the critic the step began with, once computed
    returns: Tensor | None = None  # [B, T-1] float32, the critic's targets
    # a mixture's, by `RouteFormat`, of the tokens of the model's input, on the host; None: its routers decide
    routes: Tensor | None = None
    ages: Tensor | None = None  # [B, T-1] uint8, updates since the token was sampled; None: none since any
    images: list[ImagePlace] = field(default_factory=list)  # in the order of their places

    @property
    def ways(self) -> int:
        """The number of ranks that share it."""
        return len(self.layout.pack.parts) if self.layout.pack is not None else 1

    @property
    def counts(self) -> bool:
        """True if its loss and figures count here: of ranks that share it, all of which have them, on the first."""
        return self.layout.pack is None or self.layout.pack.begin == 0

    def trained(self, values: Tensor) -> Tensor:
        """The values [K] of this rank's targets, from `values` [B, T-1]."""
        return values.flatten().index_select(0, self.layout.targets)

    def spread(self, values: Tensor) -> Tensor:
        """[B, T-1] with the K values at their targets, 0 elsewhere."""
        zeros = values.new_zeros(self.loss_mask.numel())
        return zeros.index_copy(0, self.layout.targets, values).view_as(self.loss_mask)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same with its tensors on a device, except routes, which go there for a pass at a time."""
        moved = cast(MicroBatch, _moved(self, device))
        return replace(moved, routes=self.routes)


def _moved(value: Any, device: torch.device | str) -> Any:
    """A dataclass with the tensors in it, and in the dataclasses in it, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, Layout | Pack | MicroBatch):
        return value
    return replace(value, **{each.name: _moved(getattr(value, each.name), device) for each in fields(value)})


@dataclass
class Outputs:
    """A model's outputs for a micro-batch's targets, each [B, T-1] float32 and 0 where the loss mask is 0."""

    logprobs: Tensor  # of the targets, nats, at the sampling temperature
    entropy: Tensor  # of the distribution that the target was drawn from, nats
    # expected return of the state in which the target was sampled; where a value head shares the trunk
    values: Tensor | None = None
    routes: Tensor | None = None  # as `MicroBatch.routes`, where they are recorded


LossFn = Callable[[MicroBatch, Outputs], tuple[Tensor, dict[str, Tensor]]]
"""(batch, outputs) -> the batch's summed loss, already divided by the whole step's count, and figures to be summed over
micro-batches and ranks."""


@dataclass
class UpdateStats:
    """The result of one optimizer step; the same on all ranks."""

    loss: float  # of the whole step over all ranks
    grad_norm: float  # global L2 norm before clipping
    learning_rate: float  # the rate the step used, or would have used
    skipped: bool  # loss or gradient was not finite, so nothing was changed
    # the loss function's figures, summed over micro-batches and ranks
    sums: dict[str, float] = field(default_factory=dict)


class Routers(Protocol):
    """A mixture's routers, as those who prepare its micro-batches see them."""

    format: RouteFormat
    pull: Tensor | None  # [layers, experts] float32, by which a token's probabilities count in the balance loss

    def take_counts(self) -> tuple[Tensor, int, float]:
        """Since the last time: each expert's tokens [layers, experts] int64, on the host; of the tokens, counted in
        each layer, those that the router itself would have sent elsewhere; and the balance loss.
        """


class Scorer(Protocol):
    """A model that says how likely tokens are: a policy, or its reference."""

    @property
    def work(self) -> Work:
        """The work it has done so far on this rank; one object for one model, even under two names."""

    def score(self, batches: list[MicroBatch], temperature: float) -> list[Outputs]:
        """The outputs for each batch, without gradients. Collective."""


class Policy(Scorer, Protocol):
    """A language model, sharded over the ranks, that scores tokens and learns from them.

    Every method is collective, attributes excepted: all ranks call it, with equally many micro-batches.
    """

    device: torch.device
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    routing: Routers | None = None  # a mixture's; also None where its routers cannot be looked into

    @property
    def version(self) -> int:
        """The number of updates applied; skipped ones do not count."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters under the names they have in the Transformers model, tied ones once; sharded, as they are."""

    def shard_tensors(self) -> Iterator[Tensor]:
        """Every tensor that has the memory of this rank's parts of the weights, for it to be exchanged for other."""

    def score_tokens(self, token_ids: list[int]) -> list[float]:
        """Log-probability (nats, temperature 1) of each of `token_ids[1:]`, the sharding manager's probe."""
        ids, ones, lengths = torch.tensor([token_ids]), torch.ones(1, len(token_ids) - 1), [len(token_ids)]
        zeros, layout = torch.zeros_like(ones), Layout.of(ones, lengths)
        batch = MicroBatch(ids, ones, engine_logprobs=zeros, advantages=zeros, lengths=lengths, layout=layout)
        return self.score([batch.to(self.device)], temperature=1.0)[0].logprobs[0].tolist()

    def update(
        self, batches: list[MicroBatch], loss_fn: LossFn, temperature: float, place: float | None = None
    ) -> UpdateStats:
        """One optimizer step on the sum of all losses over micro-batches and ranks, or none, on all ranks alike.

        `place` is the run's progress, for the learning rate: see `optimizer.learning_rate_factor`. None: as many
        updates were asked for as were applied. Raises TrainingDiverged on all ranks when the last
        `policy.max_skipped_steps` updates were all skipped.
        """

    def release(self, weights: bool) -> int:
        """Put away what policy.offload names: optimizer state, and the weights themselves if `weights`; returns bytes.

        Not collective. Until `restore` no other method may be called, except those that need only weights not put away.
        """

    def restore(self) -> None:
        """Bring everything back."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors of model and optimizer, and counters, as torch.distributed.checkpoint wants them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""


@torch.no_grad()
def culprits(policy: Policy) -> str:
    """A clause that names the first parameter, in the model's order, with a NaN or an infinity. Collective."""
    parameters = dict(policy.named_parameters())
    own = [name for name, parameter in parameters.items() if not torch.isfinite(local_part(parameter)).all()]
    bad = set().union(*exchange(own))
    if not bad:
        return "all parameters of the policy are finite: look at the engine's dtype, kernels and logits processors"
    first = next(name for name in parameters if name in bad)
    count = f" (the first of {len(bad)})" if len(bad) > 1 else ""
    return f"the policy's parameter {first}{count} holds values that are not finite"
