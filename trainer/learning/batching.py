"""Division of samples of unequal length into micro-batches of bounded size, equally many of them on every rank."""

from collections.abc import Callable
from heapq import heapreplace
from typing import Any

import torch
from torch import Tensor

from sharding.ranks import all_reduce_max, rank, world_size
from trainer.types import ImagePlace, Layout, MicroBatch, Sample

TABLE = 4
"""Most elements of a micro-batch's tables, as a multiple of the token budget. Tables are padded, unlike the model."""


def assign_to_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
    """Spreads sequences so that all ranks have about equally many tokens, or equal loads of any other kind.

    Sequences go, longest first, to the rank with the fewest tokens so far (the lowest number among equals), so every
    rank that calls this with the same lengths gets the same result. A rank is at most one sequence above the average.
    Returns for each rank the indices of its sequences, in ascending order; some ranks may have none.
    """
    loads = [(0, number) for number in range(ranks)]  # a heap
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for index in _longest_first(lengths):
        load, number = loads[0]
        heapreplace(loads, (load + lengths[index], number))
        assigned[number].append(index)
    return [sorted(indices) for indices in assigned]


def deal(lengths: list[int], worth: Callable[[int], int], ways: int) -> list[list[int]]:
    """Deals sequences out so that all ranks have about equal work; returns each rank's indices in ascending order.

    `worth` gives the work of a sequence of some length. Each `ways` neighbouring ranks train on the same sequences.
    """
    rows = assign_to_ranks([worth(length) for length in lengths], world_size() // ways)
    return [rows[number // ways] for number in range(world_size())]


def pack(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Groups sequences so that the sum of their lengths is within the budget: first fit, longest first.

    Tables of rows x longest row are at most `TABLE` times the budget, so that one long sequence and many short ones are
    not in one group. Where this limit does not matter, there are at most 11/9 of the fewest groups possible (Johnson,
    1973). A sequence longer than the budget is a group by itself.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length, most = lengths[index], TABLE * token_budget
        able = (n for n, g in enumerate(groups) if length <= room[n] and (len(g) + 1) * lengths[g[0]] <= most)
        fitting = next(able, len(groups))
        if fitting == len(groups):
            groups.append([])
            room.append(token_budget)
        groups[fitting].append(index)
        room[fitting] -= length
    return groups


def pack_padded(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Groups sequences of similar length so that rows x longest row stays within the budget, padding included.

    Groups are ordered longest first, so that the largest micro-batch, which may run out of memory, comes first. A
    sequence longer than the budget is a group by itself.
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


def micro_batches(
    samples: list[Sample],
    token_budget: int,
    pad_id: int,
    device: torch.device | str,
    count: int | None = None,
    packing: bool = False,
    ways: int = 1,
    worth: Callable[[int], int] = lambda length: length,
    image_token: float = 0.0,
) -> list[MicroBatch]:
    """Divides this rank's samples into micro-batches of at most `token_budget` tokens.

    Args:
        samples: the samples of this rank.
        token_budget: most tokens of a micro-batch.
        pad_id: the id of padding tokens.
        device: the device of the micro-batches' tensors.
        count: number of micro-batches to return, at least as many as the samples need; the rest are zero-weight
            micro-batches that take part in every collective, forward and backward, and add nothing. None: the largest
            number that any rank needs, and at least one; the call is then collective.
        packing: True: the budget is for real tokens, which are laid end to end; False: for padded ones.
        ways: number of neighbouring ranks with the same samples that share each micro-batch and its budget; 1 if
            padded.
        worth: gives the work of a sequence of some length, in which packed micro-batches are made about equal.
        image_token: number of tokens of the budget that each token of an image counts besides itself (`ModelFlops`).
            It is multiplied by `ways`, since each rank has all images of a micro-batch that it shares.
    """
    more = image_token * ways
    lengths = [len(sample.input_ids) + round(more * sum(n for _, n in sample.image_spans)) for sample in samples]
    groups = (pack if packing else pack_padded)(lengths, token_budget)
    if count is None:
        count = max(1, int(all_reduce_max({"micro_batches": len(groups)})["micro_batches"]))
    if count < len(groups):
        raise ValueError(f"{len(samples)} samples need {len(groups)} micro-batches, but only {count} are allowed")
    if packing:
        groups = _level(groups, lengths, token_budget, count, worth)

    def padded(samples: list[Sample], rows: list[int]) -> MicroBatch:
        return _pad(samples, rows, pad_id, packing, ways).to(device)

    batches = [padded([samples[i] for i in group], group) for group in groups]
    filler = Sample(input_ids=[pad_id], loss_mask=[0], engine_logprobs=[0.0])
    return batches + [padded([filler], []) for _ in range(count - len(groups))]


def _level(
    groups: list[list[int]], lengths: list[int], token_budget: int, count: int, worth: Callable[[int], int]
) -> list[list[int]]:
    """Regroups sequences into `count` groups of about equal load, largest first, where the budget allows it.

    Ranks wait for each other in every micro-batch, so it takes as long as the fullest one.
    """
    even = [group for group in assign_to_ranks([worth(length) for length in lengths], count) if group]
    for sizes in ([lengths[i] for i in group] for group in even if len(group) > 1):
        if sum(sizes) > token_budget or len(sizes) * max(sizes) > TABLE * token_budget:
            even = groups
    even = [sorted(group, key=lambda i: (-lengths[i], i)) for group in even]
    return sorted(even, key=lambda group: -sum(lengths[i] for i in group))


def _pad(samples: list[Sample], rows: list[int], pad_id: int, packed: bool, ways: int) -> MicroBatch:
    """Right-pads samples to the longest, and to at least two positions, so that there is always a target column."""
    lengths = [len(sample.input_ids) for sample in samples]
    width = max(2, *lengths)

    def table(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        padded = torch.full((len(rows), width), fill, dtype=dtype)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row)] = torch.tensor(row, dtype=dtype)
        return padded

    mask = table([sample.loss_mask for sample in samples], 0.0, torch.float32)[:, 1:].contiguous()
    logprobs = table([sample.engine_logprobs for sample in samples], 0.0, torch.float32)[:, 1:].contiguous()
    routes = [sample.routes for sample in samples if sample.routes is not None]
    sizes = [max(1, length - 1) if packed else width - 1 for length in lengths]
    ages = table([sample.ages for sample in samples], 0, torch.uint8)[:, 1:] if any(s.ages for s in samples) else None
    layout = Layout.of(mask, lengths, packed, ways, rank() % ways)
    joined = torch.cat(list(map(_stretched, routes, sizes))) if routes else None
    if joined is not None and layout.pack is not None:
        joined = layout.pack.local(_stretched(joined, sum(layout.pack.lengths)))
    return MicroBatch(
        input_ids=table([sample.input_ids for sample in samples], pad_id, torch.int64),
        loss_mask=mask,
        engine_logprobs=logprobs,
        advantages=torch.zeros_like(mask),
        lengths=lengths,
        layout=layout,
        rows=rows,
        routes=joined,
        ages=ages,
        images=[place for row, sample in enumerate(samples) for place in _image_places(row, sample)],
    )


def _image_places(row: int, sample: Sample) -> list[ImagePlace]:
    """The places of the images that targets may depend on: those before the last token, which predicts nothing."""
    last = len(sample.input_ids) - 1
    pairs = zip(sample.images, sample.image_spans, strict=True)
    return [ImagePlace(image, row, start, size) for image, (start, size) in pairs if start + size <= last]


def _stretched(routes: Tensor, size: int) -> Tensor:
    """Rows of routes, followed by padding rows, which go to the first experts."""
    padding = torch.arange(routes.shape[2]).to(routes.dtype).expand(size - len(routes), *routes.shape[1:])
    return torch.cat([routes, padding])
