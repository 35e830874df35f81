"""Division of samples of unequal length into micro-batches of bounded size, equally many of them on
every rank.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sharding.ranks import all_reduce_max, rank, world_size
from trainer.config.schema import TrainConfig
from trainer.learning.answers import Answer
from trainer.learning.prefixes import Prefixes, token_bytes
from trainer.learning.routes import engine_routes
from trainer.policy.packing import make_layout
from trainer.types import ImageSpan, MicroBatch, Policy, RouteFormat, Sample, Trie

TABLE = 4
"""Most elements of a micro-batch's tables, as a multiple of the token budget. Tables are padded,
unlike the model.
"""

UNEVEN = 1.1
"""Most work of a rank, as a multiple of the mean, for which sequences with a common beginning stay
together.
"""

SHARED_TABLE = 16
"""As `TABLE`, where common beginnings are computed once: each row of a table has its own copy of
them.
"""


def assign_to_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
    """Spread sequences so that all ranks have about equally many tokens, or equal loads of any
    other kind.

    Sequences go, longest first, to the rank with the fewest tokens so far (the lowest number among
    equals), so every rank that calls this with the same lengths gets the same result. A rank is at
    most one sequence above the average. Returns for each rank the indices of its sequences, in
    ascending order; some ranks may have none.
    """
    loads = [(0, number) for number in range(ranks)]  # a heap
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for index in _longest_first(lengths):
        load, number = loads[0]
        heapreplace(loads, (load + lengths[index], number))
        assigned[number].append(index)
    return [sorted(indices) for indices in assigned]


def deal(
    lengths: list[int], worth: Callable[[int], int], ways: int, prefixes: Prefixes | None = None
) -> list[list[int]]:
    """Deal sequences out so that all ranks have about equal work; return each rank's indices in
    ascending order.

    `worth` gives the work of a sequence of some length. Each `ways` neighbouring ranks train on the
    same sequences. With `prefixes`, sequences with a common beginning, whose work is that of their
    trie, stay together where it can be.
    """
    ranks = world_size() // ways
    works = [worth(length) for length in lengths]
    rows = assign_to_ranks(works, ranks)
    if prefixes is not None and ranks > 1:
        rows = _deal_units(prefixes, worth, rows)
    return [rows[number // ways] for number in range(world_size())]


def _deal_units(
    prefixes: Prefixes, worth: Callable[[int], int], apart: list[list[int]]
) -> list[list[int]]:
    """Deal units out, and cut the fullest rank's largest until no rank is more than `UNEVEN` times
    the mean.

    Nor may the fullest rank have more work than if sequences were dealt out one by one, as in
    `apart`.
    """

    def work(rows: list[int]) -> int:
        return prefixes.cost(prefixes.sorted(rows), worth)

    units = prefixes.units(lambda unit: True)
    works = list(map(work, units))
    most = max(map(work, apart))
    while True:
        shares = assign_to_ranks(works, len(apart))
        dealt = []
        for share in shares:
            rows = [row for number in share for row in units[number]]
            dealt.append(sorted(rows))
        loads = list(map(work, dealt))  # parts of a unit that meet again have their beginning once
        fullest = loads.index(max(loads))
        able = [number for number in shares[fullest] if len(units[number]) > 1]
        if loads[fullest] <= most and (not able or loads[fullest] <= UNEVEN * sum(loads) / len(loads)):
            return dealt
        if not able:
            return apart
        largest = max(able, key=works.__getitem__)
        units[largest : largest + 1] = halves = prefixes.cut(units[largest])
        works[largest : largest + 1] = map(work, halves)


class Unit(NamedTuple):
    """A unit goes to one micro-batch: it is a sequence, or several that have a beginning in
    common.
    """

    rows: list[int]  # the indices of its sequences
    tokens: int  # the tokens of the budget that it counts
    work: int  # see `deal`
    longest: int  # the length of the longest sequence


def pack(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group sequences as `pack_units` does units."""
    return pack_units([Unit([i], length, 0, length) for i, length in enumerate(lengths)], token_budget)


def pack_units(units: list[Unit], token_budget: int, table: int = TABLE) -> list[list[int]]:
    """Group units so that the sum of their tokens is within the budget: first fit, largest first.

    Tables of rows x longest row are at most `table` times the budget, so that one long sequence and
    many short ones are not in one group. Where this limit does not matter, there are at most 11/9
    of the fewest groups possible (Johnson, 1973). A unit larger than the budget is a group by
    itself.
    """
    groups: list[list[int]] = []
    sums: list[tuple[int, int, int]] = []  # of each group: tokens, rows, longest row
    for index in _longest_first([unit.tokens for unit in units]):
        unit = units[index]
        fitting = len(groups)
        for number, (tokens, rows, longest) in enumerate(sums):
            elements = (rows + len(unit.rows)) * max(longest, unit.longest)
            if tokens + unit.tokens <= token_budget and elements <= table * token_budget:
                fitting = number
                break
        if fitting == len(groups):
            groups.append([])
            sums.append((0, 0, 0))
        groups[fitting].append(index)
        tokens, rows, longest = sums[fitting]
        sums[fitting] = tokens + unit.tokens, rows + len(unit.rows), max(longest, unit.longest)
    return groups


def pack_padded(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Group sequences of similar length so that rows x longest row stays within the budget, padding
    included.

    Groups are ordered longest first, so that the largest micro-batch, which may run out of memory,
    comes first. A sequence longer than the budget is a group by itself.
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


@dataclass(frozen=True)
class Batcher:
    """Divides a rank's samples into micro-batches: built once, it holds what is the same for all of
    them.

        batcher = Batcher.of(config, policy, pad_id)
        shares = batcher.deal_answers(answers)  # which of a step's answers each rank trains on
        ...  # each rank receives the samples of its share
        batches = batcher.micro_batches(samples)

    Attributes: token_budget: most tokens of a micro-batch. pad_id: the id of padding tokens.
        device: the device of the micro-batches' tensors. packing: True: the budget is for real
        tokens, which are laid end to end; False: for padded ones. ways: number of neighbouring
        ranks with the same samples that share each micro-batch and its budget; 1 if padded. worth:
        gives the work of a sequence of some length, in which packed micro-batches are made about
        equal. image_token: number of tokens of the budget that each token of an image counts
        besides itself (`ModelFlops`). It is multiplied by `ways`, since each rank has all images of
        a micro-batch that it shares. shared_min: fewest tokens that sequences must have in common
        for these to be computed, and count, once in a packed micro-batch (`batch.share_prefixes`);
        None: every sequence is whole. repeated: number of tokens of the budget that a token counts
        each time that a hybrid's mixers compute it again (`ModelFlops.recurrent_share`). routes:
        the format of the engine's routes; None: samples have no routes of the engine's.
    """

    token_budget: int
    pad_id: int
    device: torch.device | str
    packing: bool = False
    ways: int = 1
    worth: Callable[[int], int] = lambda length: length
    image_token: float = 0.0
    shared_min: int | None = None
    repeated: float = 0.0
    routes: RouteFormat | None = None

    @classmethod
    def of(cls, config: TrainConfig, policy: Policy, pad_id: int) -> "Batcher":
        """Return the batcher that a recipe describes, with the device, the sizes and the routes of
        a policy.
        """
        sizes = policy.work.of
        return cls(
            token_budget=config.batch.tokens_per_micro_batch,
            pad_id=pad_id,
            device=policy.device,
            packing=config.batch.packing,
            ways=config.policy.sequence_parallel,
            worth=sizes.tokens_worth,
            image_token=sizes.image_token,
            shared_min=config.batch.shared_min,
            repeated=sizes.recurrent_share,
            routes=engine_routes(config, policy),
        )

    def deal_answers(self, answers: Sequence[Answer]) -> list[list[int]]:
        """Return the positions of the answers that each rank trains on, ascending (`deal`).
        Collective.
        """
        prefixes = None
        if self.shared_min is not None:
            prefixes = Prefixes.of_answers(answers, self.shared_min, self.repeated)
        return deal([answer.length for answer in answers], self.worth, self.ways, prefixes)

    def deal_samples(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return what `deal_answers` does, of samples that are the same on all ranks. Not
        collective.
        """
        prefixes = None
        if self.shared_min is not None:
            tokens = [token_bytes(sample.input_ids) for sample in samples]
            prefixes = Prefixes.of(tokens, self.shared_min, self.repeated)
        return deal([len(sample.input_ids) for sample in samples], self.worth, self.ways, prefixes)

    def micro_batches(self, samples: Sequence[Sample], count: int | None = None) -> list[MicroBatch]:
        """Divide this rank's samples into `count` micro-batches, at least as many as the samples
        need.

        The rest are zero-weight micro-batches that take part in every collective, forward and
        backward, and add nothing. Without a count, there are as many as the rank that needs most
        has, and at least one; the call is then collective.
        """
        lengths = [self._counted(sample) for sample in samples]
        units = [Unit([row], length, self.worth(length), length) for row, length in enumerate(lengths)]
        prefixes = None
        table = TABLE
        if self.shared_min is not None and self.packing:
            images = any(sample.images for sample in samples)
            inputs = [_token_bytes(sample, images) for sample in samples]
            prefixes = Prefixes.of(inputs, self.shared_min, self.repeated)
            table = SHARED_TABLE
            units = self._shared_units(prefixes, samples)
        if self.packing:
            groups = pack_units(units, self.token_budget, table)
        else:
            groups = pack_padded(lengths, self.token_budget)
        if count is None:
            count = max(1, int(all_reduce_max({"micro_batches": len(groups)})["micro_batches"]))
        if count < len(groups):
            raise ValueError(
                f"{len(samples)} samples need {len(groups)} micro-batches, but only {count} are allowed"
            )
        if self.packing:
            groups = self._level(groups, units, table, count)
        batches = []
        for group in groups:
            members = [row for unit in group for row in units[unit].rows]
            rows, trie = _in_common(members, prefixes)
            batches.append(self._padded([samples[row] for row in rows], rows, trie))
        filler = Sample(input_ids=[self.pad_id], loss_mask=[0], engine_logprobs=[0.0])
        return batches + [self._padded([filler], []) for _ in range(count - len(groups))]

    def _counted(self, sample: Sample) -> int:
        """Return the tokens of the budget that a whole sample counts."""
        return len(sample.input_ids) + self._images_worth(size for _, size in sample.image_spans)

    def _images_worth(self, sizes: Iterable[int]) -> int:
        """Return what the tokens of images of these sizes count besides themselves."""
        return round(self.image_token * self.ways * sum(sizes))

    def _shared_units(self, prefixes: Prefixes, samples: Sequence[Sample]) -> list[Unit]:
        """Return units of sequences with a beginning in common, cut where they exceed the budget or
        their table would.

        Each of a unit's images counts once.
        """

        def unit_of(rows: list[int]) -> Unit:
            images = {}
            for row in rows:
                for image, (_, size) in zip(samples[row].images, samples[row].image_spans, strict=True):
                    images[image.digest] = size
            tokens = prefixes.cost(rows) + self._images_worth(images.values())
            longest = max(len(samples[row].input_ids) for row in rows)
            return Unit(rows, tokens, prefixes.cost(rows, self.worth), longest)

        def fits(rows: list[int]) -> bool:
            unit = unit_of(rows)
            return (
                unit.tokens <= self.token_budget
                and len(rows) * unit.longest <= SHARED_TABLE * self.token_budget
            )

        return list(map(unit_of, prefixes.units(fits)))

    def _level(
        self, groups: list[list[int]], units: list[Unit], table: int, count: int
    ) -> list[list[int]]:
        """Regroup units into `count` groups of about equal work, largest first, where budget and
        table allow it.

        Ranks wait for each other in every micro-batch, so it takes as long as the fullest one.
        """
        works = [unit.work for unit in units]
        even = [group for group in assign_to_ranks(works, count) if group]
        for group in even:
            some = [units[i] for i in group]
            tokens = sum(unit.tokens for unit in some)
            elements = sum(len(unit.rows) for unit in some) * max(unit.longest for unit in some)
            exceeds = tokens > self.token_budget or elements > table * self.token_budget
            if exceeds and len(group) > 1:
                even = groups
        even = [sorted(group, key=lambda i: (-units[i].tokens, i)) for group in even]
        return sorted(even, key=lambda group: -sum(units[i].tokens for i in group))

    def _padded(self, samples: list[Sample], rows: list[int], trie: Trie | None = None) -> MicroBatch:
        """Right-pad samples to the longest, and to at least two positions, so that there is always
        a target column.
        """
        lengths = [len(sample.input_ids) for sample in samples]
        width = max(2, *lengths)

        def table(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
            padded = torch.full((len(rows), width), fill, dtype=dtype)
            for line, row in zip(padded, rows, strict=True):
                line[: len(row)] = torch.tensor(row, dtype=dtype)
            return padded

        ids = table([sample.input_ids for sample in samples], self.pad_id, torch.int64)
        mask = table([sample.loss_mask for sample in samples], 0.0, torch.float32)
        mask = mask[:, 1:].contiguous()
        logprobs = table([sample.engine_logprobs for sample in samples], 0.0, torch.float32)
        logprobs = logprobs[:, 1:].contiguous()
        routes = [sample.routes for sample in samples if sample.routes is not None]
        sizes = [max(1, length - 1) if self.packing else width - 1 for length in lengths]
        ages = None
        if any(sample.ages for sample in samples):
            ages = table([sample.ages for sample in samples], 0, torch.uint8)[:, 1:]
        layout = make_layout(mask, lengths, self.packing, self.ways, rank() % self.ways, trie)
        if routes and trie is not None:
            routes = [routes[node.row][node.begin : node.end] for node in trie[0]]
            sizes = [node.end - node.begin for node in trie[0]]
        joined = torch.cat(list(map(_stretched, routes, sizes))) if routes else None
        if joined is not None and layout.pack is not None:
            joined = layout.pack.local(_stretched(joined, sum(layout.pack.lengths)))
        images = [span for row, sample in enumerate(samples) for span in _image_spans(row, sample)]
        return MicroBatch(
            input_ids=ids,
            loss_mask=mask,
            engine_logprobs=logprobs,
            advantages=torch.zeros_like(mask),
            lengths=lengths,
            layout=layout,
            rows=rows,
            routes=joined,
            ages=ages,
            images=images,
        ).to(self.device)


def micro_batches(
    samples: Sequence[Sample],
    token_budget: int,
    pad_id: int,
    device: torch.device | str,
    count: int | None = None,
    packing: bool = False,
    **settings: Any,
) -> list[MicroBatch]:
    """Divide this rank's samples into micro-batches without a recipe; `settings` are other fields
    of `Batcher`.
    """
    return Batcher(token_budget, pad_id, device, packing, **settings).micro_batches(samples, count)


def _in_common(rows: list[int], prefixes: Prefixes | None) -> tuple[list[int], Trie | None]:
    """Return sequences in order with their trie, or as they are with None where they have nothing
    in common.
    """
    if prefixes is not None:
        ordered = prefixes.sorted(rows)
        nodes, last = prefixes.trie(ordered)
        if any(node.rows > 1 for node in nodes):
            return ordered, (nodes, last)
    return rows, None


def _token_bytes(sample: Sample, images: bool) -> np.ndarray:
    """Return what enters the model with a sample's tokens; two sets of experts are equal in any
    order.
    """
    inputs = [] if sample.routes is None else [np.sort(sample.routes.numpy(), axis=2)]
    if images:
        digests = np.zeros((len(sample.input_ids) - 1, 32), dtype="u1")
        for span in _image_spans(0, sample):
            digests[span.start : span.start + span.length] = list(bytes.fromhex(span.image.digest))
        inputs.append(digests)
    return token_bytes(sample.input_ids, *inputs)


def _image_spans(row: int, sample: Sample) -> list[ImageSpan]:
    """Return the places of the images that targets may depend on: those before the last token,
    which predicts nothing.
    """
    last = len(sample.input_ids) - 1
    pairs = zip(sample.images, sample.image_spans, strict=True)
    return [ImageSpan(image, row, start, size) for image, (start, size) in pairs if start + size <= last]


def _stretched(routes: Tensor, size: int) -> Tensor:
    """Return rows of routes, followed by padding rows, which go to the first experts."""
    padding = (
        torch.arange(routes.shape[2]).to(routes.dtype).expand(size - len(routes), *routes.shape[1:])
    )
    return torch.cat([routes, padding])
