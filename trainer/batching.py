"""From samples of unequal length to micro-batches of bounded size, the same number of them on every rank."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from trainer.distributed import all_reduce_max


@dataclass
class Sample:
    """One sequence to train on, prompt and response together; the four lists are equally long.

    Attributes:
        input_ids: prompt and response ids; at least one.
        loss_mask: 1 where the policy sampled the token, 0 elsewhere, so 0 on the whole prompt. By position, never by
            id.
        engine_logprobs: nats, under the distribution the token was sampled from; 0.0 where loss_mask is 0.
        advantage: the same for every token of the sequence, where it is known beforehand.
    """

    input_ids: list[int]
    loss_mask: list[int]
    engine_logprobs: list[float]
    advantage: float = 0.0

    @property
    def trainable(self) -> int:
        """Tokens that are learned. The first is not among them, whatever its mask: nothing comes before it."""
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

    Attributes:
        tokens: [N] int64, where they are in `MicroBatch.input_ids`, flattened.
        positions: [N] int64, of each in its sequence, from 0.
        starts: [S+1] int32, where each sequence begins, and N.
        lengths: of the sequences, their tokens in the pack.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: list[int]


@dataclass(frozen=True)
class Layout:
    """Where a micro-batch's K targets are: found on the host, so that a pass over it never waits for the device.

    Attributes:
        targets: [K] int64, where the loss mask is 1, in [B, T-1] flattened; ascending.
        states: [K] int64, of the hidden states that predict them in what the model runs on, flattened.
        pack: what the model runs on; None: on `input_ids[:, :-1]`.
    """

    targets: Tensor
    states: Tensor
    pack: Pack | None = None

    @classmethod
    def of(cls, loss_mask: Tensor, lengths: list[int], packed: bool = False) -> "Layout":
        """The layout for a mask [B, T-1] that is on the host."""
        width = loss_mask.shape[1]
        targets = loss_mask.flatten().nonzero().squeeze(1)
        if not packed:
            return cls(targets, targets)
        sizes = [max(1, length - 1) for length in lengths]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        rows, columns = targets // width, targets % width
        positions = torch.cat([torch.arange(size) for size in sizes])
        tokens = positions + torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * (width + 1)
        return cls(targets, starts[rows] + columns, Pack(tokens, positions, starts.int(), sizes))


@dataclass
class MicroBatch:
    """B right-padded sequences of T positions; what is about targets has T - 1 columns, aligned to `input_ids[:, 1:]`.

    There is no attention mask: with padding on the right and causal attention no real token ever sees a padding token,
    and what the padding positions compute is left out of the loss. Where the loss mask is 0, tensors may hold anything,
    inf and NaN included: whoever reads one selects by the mask and does not multiply with it.

    Attributes:
        input_ids: [B, T] int64, T >= 2.
        loss_mask: [B, T-1] float32.
        engine_logprobs: [B, T-1] float32, nats.
        advantages: [B, T-1] float32.
        lengths: for each sequence its tokens without padding, 1 to T.
        layout: where the targets are, and what the model runs on: the real tokens alone, laid end to end, or padding,
            too. Nothing else depends on which it is.
        rows: for each sequence its position in the list of samples; empty in a zero-weight micro-batch.
        old_logprobs: [B, T-1] float32 of the policy the step began with, once computed.
        ref_logprobs: [B, T-1] float32 of the reference policy, once computed.
        decisive: [B, T-1] bool, the tokens that the policy loss counts; None: all.
        old_values: [B, T-1] float32 of the critic the step began with, once computed.
        returns: [B, T-1] float32, what the critic is to learn.
    """

    input_ids: Tensor
    loss_mask: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    lengths: list[int]
    layout: Layout
    rows: list[int] = field(default_factory=list)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    decisive: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def trained(self, values: Tensor) -> Tensor:
        """Of `values` [B, T-1] those of the K targets."""
        return values.flatten().index_select(0, self.layout.targets)

    def spread(self, values: Tensor) -> Tensor:
        """[B, T-1] with the K values at their targets, 0 elsewhere."""
        zeros = values.new_zeros(self.loss_mask.numel())
        return zeros.index_copy(0, self.layout.targets, values).view_as(self.loss_mask)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same with its tensors on a device."""
        return cast(MicroBatch, _moved(self, device))


def assign_to_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
    """Spread sequences so that all ranks have about equally many tokens.

    Longest first, each to the rank with the fewest tokens so far (the lowest number among equals), so every rank that
    calls this with the same lengths gets the same answer. A rank is at most one sequence above the average.

    Returns:
        for each rank the indices of its sequences, in ascending order; some ranks may have none.
    """
    loads = [0] * ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for index in _longest_first(lengths):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        assigned[rank].append(index)
    return [sorted(indices) for indices in assigned]


def pack(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group sequences so that their lengths add up to the budget at most: first fit, longest first.

    It takes at most 11/9 of the fewest groups possible (Johnson, 1973). A sequence longer than the budget is a group by
    itself.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        fitting = next((number for number, left in enumerate(room) if length <= left), None)
        if fitting is None:
            groups.append([index])
            room.append(token_budget - length)
        else:
            groups[fitting].append(index)
            room[fitting] -= length
    return groups


def pack_padded(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group sequences of similar length so that rows x longest row stays within the budget, padding included.

    Longest first, so that the largest micro-batch, the one that may run out of memory, comes first. A sequence longer
    than the budget is a group by itself.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in _longest_first(lengths):
        if groups and (len(groups[-1]) + 1) * longest <= token_budget:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def agree_on_count(count: int) -> int:
    """The largest number of micro-batches any rank has: every rank runs that many."""
    return int(all_reduce_max({"micro_batches": count})["micro_batches"])


def micro_batches(
    samples: list[Sample],
    token_budget: int,
    pad_id: int,
    device: torch.device | str,
    count: int | None = None,
    packing: bool = False,
) -> list[MicroBatch]:
    """Cut this rank's samples into micro-batches of at most `token_budget` tokens.

    Args:
        count: how many to return, at least as many as the samples need; the rest are zero-weight micro-batches that
            take part in every collective, forward and backward, and add nothing. None: as many as any rank needs and at
            least one, which is a collective call.
        packing: the budget is for real tokens, which are laid end to end; False: for padded ones.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    groups = (pack if packing else pack_padded)(lengths, token_budget)
    if count is None:
        count = max(1, agree_on_count(len(groups)))
    if count < len(groups):
        raise ValueError(f"{len(groups)} micro-batches are needed for {len(samples)} samples, but only {count} allowed")
    if packing:
        groups = _level(groups, lengths, token_budget, count)
    batches = [_pad([samples[i] for i in group], group, pad_id, device, packing) for group in groups]
    filler = Sample(input_ids=[pad_id], loss_mask=[0], engine_logprobs=[0.0], advantage=0.0)
    return batches + [_pad([filler], [], pad_id, device, packing) for _ in range(count - len(groups))]


def _level(groups: list[list[int]], lengths: list[int], token_budget: int, count: int) -> list[list[int]]:
    """The same sequences in `count` groups of about equal load, where the budget allows it, largest first.

    Ranks wait for each other in every micro-batch: its cost is that of the fullest one.
    """
    even = [group for group in assign_to_ranks(lengths, count) if group]
    if any(len(group) > 1 and sum(lengths[i] for i in group) > token_budget for group in even):
        even = groups
    even = [sorted(group, key=lambda i: (-lengths[i], i)) for group in even]
    return sorted(even, key=lambda group: -sum(lengths[i] for i in group))


def scored_batch(token_ids: list[int], device: torch.device) -> MicroBatch:
    """One sequence of which every token but the first is scored, and nothing learned."""
    ids, lengths = torch.tensor([token_ids]), [len(token_ids)]
    ones = torch.ones(1, len(token_ids) - 1)
    nothing = torch.zeros_like(ones)
    return MicroBatch(ids, ones, nothing, nothing, lengths, Layout.of(ones, lengths)).to(device)


def _moved(value: Any, device: torch.device | str) -> Any:
    """A dataclass with the tensors in it, and in the dataclasses in it, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not isinstance(value, Layout | Pack | MicroBatch):
        return value
    return replace(value, **{each.name: _moved(getattr(value, each.name), device) for each in fields(value)})


def _pad(samples: list[Sample], rows: list[int], pad_id: int, device: torch.device | str, packed: bool) -> MicroBatch:
    """Right-pad to the longest, and to two positions, so that there is a target column in any case."""
    lengths = [len(sample.input_ids) for sample in samples]
    width = max(2, *lengths)

    def table(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        padded = torch.full((len(rows), width), fill, dtype=dtype)
        for own, row in zip(padded, rows, strict=True):
            own[: len(row)] = torch.tensor(row, dtype=dtype)
        return padded

    mask = table([sample.loss_mask for sample in samples], 0.0, torch.float32)[:, 1:].contiguous()
    logprobs = table([sample.engine_logprobs for sample in samples], 0.0, torch.float32)[:, 1:].contiguous()
    advantages = torch.tensor([sample.advantage for sample in samples]).unsqueeze(1)
    return MicroBatch(
        input_ids=table([sample.input_ids for sample in samples], pad_id, torch.int64),
        loss_mask=mask,
        engine_logprobs=logprobs,
        advantages=advantages.expand_as(mask).contiguous(),
        lengths=lengths,
        layout=Layout.of(mask, lengths, packed),
        rows=rows,
    ).to(device)
