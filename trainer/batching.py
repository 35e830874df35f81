"""From samples of unequal length to micro-batches of bounded size, the same number of them on every rank."""

from dataclasses import dataclass, field

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
        rows: for each sequence its position in the list of samples; empty in a zero-weight micro-batch.
        old_logprobs: [B, T-1] float32 of the policy the step began with, once computed.
        ref_logprobs: [B, T-1] float32 of the reference policy, once computed.
        decisive: [B, T-1] bool, the tokens that the policy loss counts; None: all.
        old_values: [B, T-1] float32 of the critic the step began with, once computed.
        returns: [B, T-1] float32, what the critic is to learn.
        packed: the model runs on the real tokens alone, laid end to end; nothing else is different.
    """

    input_ids: Tensor
    loss_mask: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    lengths: list[int]
    rows: list[int] = field(default_factory=list)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    decisive: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    packed: bool = False

    @property
    def packed_lengths(self) -> list[int] | None:
        """What the model is told: the lengths of sequences laid end to end, or None for padded rows."""
        return self.lengths if self.packed else None


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
        return groups
    even = [sorted(group, key=lambda i: (-lengths[i], i)) for group in even]
    return sorted(even, key=lambda group: -sum(lengths[i] for i in group))


def scored_batch(token_ids: list[int], device: torch.device) -> MicroBatch:
    """One sequence of which every token but the first is scored, and nothing learned."""
    ids = torch.tensor([token_ids], device=device)
    ones = torch.ones(1, len(token_ids) - 1, device=device)
    return MicroBatch(ids, ones, torch.zeros_like(ones), torch.zeros_like(ones), [len(token_ids)])


def _pad(samples: list[Sample], rows: list[int], pad_id: int, device: torch.device | str, packed: bool) -> MicroBatch:
    """Right-pad to the longest, and to two positions, so that there is a target column in any case."""
    width = max(2, *(len(sample.input_ids) for sample in samples))
    missing = [width - len(sample.input_ids) for sample in samples]
    ids = [sample.input_ids + [pad_id] * n for sample, n in zip(samples, missing, strict=True)]
    mask = [sample.loss_mask[1:] + [0] * n for sample, n in zip(samples, missing, strict=True)]
    logprobs = [sample.engine_logprobs[1:] + [0.0] * n for sample, n in zip(samples, missing, strict=True)]
    advantages = [[sample.advantage] * (width - 1) for sample in samples]
    return MicroBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64).to(device),
        loss_mask=torch.tensor(mask, dtype=torch.float32).to(device),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32).to(device),
        advantages=torch.tensor(advantages, dtype=torch.float32).to(device),
        lengths=[len(sample.input_ids) for sample in samples],
        rows=rows,
        packed=packed,
    )
