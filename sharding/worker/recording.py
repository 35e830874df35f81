"""Record and replay: the copies that vLLM's loaders made in one update, repeated without the
loaders.

At every sync, a loader finds out for each weight where it belongs: it splits fused projections,
takes a tensor-parallel rank's slice, pads vocabularies, and in the end copies a view of the weight
into a view of a parameter. Those views do not change between syncs. So the first update goes
through the loaders while a `LoadWatcher` notes every copy; later ones are one multi-tensor copy a
bucket. Two alternatives were rejected: a table of rules for each architecture, as other projects'
resharding has (it has to follow vLLM, and its errors are silent), and asking the loaders for their
plan (they have none). A weight whose loader computes something, rather than copying, is always left
to its loader.

`LoadWatcher` knows no model. Every loader ends in `copy_`, which a dispatch mode sees. From the
copies follows whether each weight was read and each parameter written in full, on every worker and
on every sync; and, by comparing instead of copying, whether the engine holds the trainer's weights.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sharding.wire.manifest import Manifest, NamedTensors, Part, View

CHANGED = "its loader changes it after copying"
CASTS = "its loader casts it"
"""Reasons why a weight cannot be replayed, and is sent by itself where all others are shared."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that stands for the tensor's memory as long as any reference to it exists,
    weak or not.
    """
    return int(tensor.untyped_storage()._cdata)  # as `StorageWeakRef(...).cdata`, in a tenth of the time


@dataclass(frozen=True)
class RecordedCopy:
    """A view of a weight that goes into a view of a parameter. `offset`: of the view's first
    element from the weight's, in elements. `shape`, `stride`: of the view, which has the target's
    shape; dimensions in the order of the weight's memory.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: Tensor

    def source(self, weight: Tensor) -> Tensor:
        """Return the view of a weight that lies elsewhere now."""
        if weight.shape == self.shape and weight.stride() == self.stride and not self.offset:
            return weight  # most are copied whole, and a view takes longer to make than to find needless
        return weight.as_strided(self.shape, self.stride, weight.storage_offset() + self.offset)

    def within(self, first: int, last: int) -> Iterator["RecordedCopy"]:
        """Return the parts of this copy that read the weight's elements [first, last), with offsets
        from the first of them.

        Of a copy of a weight [4, 6], elements [3, 14) are the last three of row 0, row 1 whole, and
        two of row 2. Rows that lie inside stay together; of those that only begin or end there, the
        inner dimensions are looked at.
        """
        if not self.shape:
            if first <= self.offset < last:
                yield replace(self, offset=self.offset - first)
            return
        touched, inside = _rows_within((self.offset, self.shape, self.stride), first, last)
        for row in (row for row in touched if row not in inside):
            offset = self.offset + row * self.stride[0]
            yield from RecordedCopy(offset, self.shape[1:], self.stride[1:], self.target[row]).within(
                first, last
            )
        if inside:
            offset = self.offset + inside.start * self.stride[0] - first
            yield RecordedCopy(
                offset,
                (len(inside), *self.shape[1:]),
                self.stride,
                self.target[inside.start : inside.stop],
            )


@dataclass(frozen=True)
class Origin:
    """The place of a weight when its loader got it; numbers only, so that staging memory is not
    kept alive.
    """

    storage: int
    offset: int
    elements: int


@dataclass
class Recording:
    """The loaders' copies, by weight; complete after one update, and valid as long as the
    parameters' memory is.

    Attributes: weights: the manifest of the update; an update of other weights has to be recorded
        anew. parameters: the memory that can be written, see `parameter_storages`. elements: of
        each weight that was copied. copies: weight -> its copies. fills: views of parameters that a
        loader filled with one number, and the number: padding. unreplayable: weights that cannot be
        replayed, and why. parts: the copies for a part of a weight, by the weight, its first
        element and how many elements there are. sealed: weight -> the view and the target of each
        copy, as the loaders made them: a second account of `copies`, by which a copy changed later
        is detected. complete: an update went through, and its copies and fills cover every
        parameter.
    """

    weights: Manifest
    parameters: frozenset[int]
    elements: dict[str, int] = field(default_factory=dict)
    copies: dict[str, list[RecordedCopy]] = field(default_factory=dict)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)
    unreplayable: dict[str, str] = field(default_factory=dict)
    parts: dict[tuple[str, int, int], list[RecordedCopy]] = field(default_factory=dict)
    sealed: dict[str, list[tuple[View, Tensor]]] = field(default_factory=dict)
    complete: bool = False

    def note_copy(self, name: str, weight: Origin | None, source: Tensor, target: Tensor) -> None:
        """Note that a loader copies `source`, a view of the weight unless it was computed, to
        `target`.
        Without `weight` it is one that came earlier, and that its loader has kept.
        """
        if weight is None:
            self.unreplayable[name] = "its loader waits for others"
        elif storage_key(source) != weight.storage:
            self.unreplayable[name] = "its loader computes with it"
        elif storage_key(target) not in self.parameters:
            self.unreplayable[name] = "what its loader copies it to is re-processed, or no parameter"
        elif source.dtype != target.dtype:
            self.unreplayable[name] = f"{CASTS} to {target.dtype}"
        else:
            view = source.expand(target.shape)
            offset = int(source.storage_offset()) - weight.offset
            # As the weight lies in memory
            order = sorted(range(view.dim()), key=view.stride, reverse=True)
            view = view.permute(order)
            copy = RecordedCopy(offset, tuple(view.shape), view.stride(), target.detach().permute(order))
            self.copies.setdefault(name, []).append(copy)
            self.elements[name] = weight.elements

    def note_fill(self, target: Tensor, value: float) -> None:
        """Note that a loader fills `target` with one number."""
        if storage_key(target) in self.parameters:
            self.fills.append((target.detach(), value))

    def replayable(self, name: str) -> bool:
        """Return True if the loaders are not needed for this weight."""
        return name in self.copies and name not in self.unreplayable

    def sent_apart(self, name: str) -> bool:
        """Return True if a weight has to be sent even where the trainer computes with the engine's
        weights.
        """
        return self.unreplayable.get(name, "").startswith((CHANGED, CASTS))

    def run(self, name: str) -> Tensor | None:
        """Return the contiguous view of a parameter that holds a weight, all of it and as it is
        sent; None: there is none.

        It may have been copied in pieces, one behind the other on both sides, as the queries, keys
        and values are of an encoder whose checkpoint has them in one.
        """
        copies = sorted(self.copies[name], key=lambda copy: copy.offset) if self.replayable(name) else []
        if not copies:
            return None
        first = copies[0].target
        read = 0
        for copy in copies:
            target = copy.target
            start = storage_key(target), target.storage_offset() - read
            alike = copy.offset == read and copy.stride == target.stride() and target.is_contiguous()
            if not alike or start != (storage_key(first), first.storage_offset()):
                return None
            read += target.numel()
        return first.as_strided((read,), (1,)) if read == math.prod(self.weights[name][0]) else None

    def leave_out(self, names: list[str]) -> list[str]:
        """Note that the model takes nothing of these weights; returns all that it takes nothing
        of.
        """
        for name in names:
            self.copies[name] = []
            self.sealed[name] = []
        return [name for name, copies in self.copies.items() if not copies]

    def targets(self, name: str) -> list[Tensor]:
        """Return the views of parameters that a weight is copied to."""
        return [copy.target for copy in self.copies[name]]

    def replay(self, weights: NamedTensors) -> None:
        """Make the recorded copies of these weights, all of which are replayable, wherever they lie
        now.
        """
        pairs = []
        for name, weight in weights:
            pairs += [(copy.target, copy.source(weight)) for copy in self.copies[name]]
        _copy_all(pairs)

    def replay_parts(self, parts: list[Part]) -> list[list[Tensor]]:
        """Replay the copies of elements of weights, cast if they come in another dtype. Return the
        views written for each part. The copies that belong to a part are worked out once.
        """
        by_part = [self._copies_within(name, first, values.numel()) for name, first, values in parts]
        written = []
        pairs = []
        for copies, (_, _, values) in zip(by_part, parts, strict=True):
            written.append([copy.target for copy in copies])
            pairs += [(copy.target, copy.source(values)) for copy in copies]
        _copy_all(pairs)
        return written

    def recall(self, weights: NamedTensors, parts: list[Part]) -> None:
        """Make the copies of `replay` and `replay_parts` in reverse, from the parameters into
        `weights` and `parts`. Weights that are not replayable are left unchanged.
        """
        copies = []
        for name, weight in weights:
            if self.replayable(name):
                copies += [(copy, weight) for copy in self.copies[name]]
        for name, first, values in parts:
            within = self._copies_within(name, first, values.numel())
            copies += [(copy, values) for copy in within]
        pairs = []
        for copy, weight in copies:
            # An expanded dimension, once
            once = tuple(slice(1) if step == 0 else slice(None) for step in copy.stride)
            pairs.append((copy.source(weight)[once], copy.target[once]))
        _copy_all(pairs)

    def reads(self, name: str, first: int, count: int) -> bool:
        """Return True if some of these elements of a weight are copied."""
        return bool(self._copies_within(name, first, count))

    def _copies_within(self, name: str, first: int, count: int) -> list[RecordedCopy]:
        key = (name, first, count)
        if key not in self.parts:
            self.parts[key] = [
                part for copy in self.copies[name] for part in copy.within(first, first + count)
            ]
        return self.parts[key]

    def refill(self) -> None:
        """Fill the padding again, which is lost where memory was released during sleep."""
        for target, value in self.fills:
            target.fill_(value)

    def distrust(self, names: Iterable[str], reason: str) -> None:
        """Leave these weights to their loaders from now on."""
        self.unreplayable |= dict.fromkeys(names, reason)

    def fits(self, model: torch.nn.Module, weights: Manifest) -> bool:
        """Return True if it can be replayed with these weights, into the memory of the model's
        parameters.
        """
        return self.complete and self.weights == weights and self.parameters == parameter_storages(model)

    @torch.no_grad()
    def move(self, model: torch.nn.Module, storages: dict[int, torch.UntypedStorage]) -> None:
        """Move the model's parameters, and the views recorded of them, to other memory of the same
        content.
        `storages`: `storage_key` of the old memory -> the new.
        """
        targets = [copy.target for copies in self.copies.values() for copy in copies]
        targets += [target for copies in self.sealed.values() for _, target in copies]
        targets += [target for target, _ in self.fills]
        for tensor in [*model.parameters(), *model.buffers(), *targets]:
            if (storage := storages.get(storage_key(tensor))) is not None:
                tensor.set_(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride())  # type: ignore[call-overload]
        self.parameters = parameter_storages(model)
        self.parts.clear()  # they are views of the old memory

    def check(self, complete: bool) -> None:
        """End the recording, and leave weights whose copies do not add up to their loaders.
        `complete`: every element of every weight has to be read, too; a tensor-parallel rank reads
        only its part.
        """
        for name, copies in self.copies.items():
            if complete and not _covers_once(
                [(c.offset, c.shape, c.stride) for c in copies], self.elements[name]
            ):
                self.unreplayable.setdefault(name, "its elements are not each read once")
        self._check_targets()
        for name, copies in self.copies.items():
            self.sealed[name] = [((c.offset, c.shape, c.stride), c.target.detach()) for c in copies]
        self.complete = True

    def _check_targets(self) -> None:
        """Distrust the weights of each storage whose elements copies and fills do not write exactly
        once.
        """
        by_storage: dict[int, tuple[set[str], list[Tensor]]] = {}
        views = [(name, copy.target) for name, copies in self.copies.items() for copy in copies]
        for name, target in [*views, *(("", target) for target, _ in self.fills)]:
            names, targets = by_storage.setdefault(storage_key(target), (set(), []))
            names.add(name)
            targets.append(target)
        for names, targets in by_storage.values():
            ranges = [(int(t.storage_offset()), tuple(t.shape), t.stride()) for t in targets]
            elements = targets[0].untyped_storage().nbytes() // targets[0].element_size()
            if not _covers_once(ranges, elements):
                self.distrust(names - {""}, "its parameter's elements are not each written once")


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy all sources to their targets, as one multi-tensor copy."""
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _rows_within(view: View, first: int, last: int) -> tuple[range, range]:
    """Return the rows of a view that have an element among [first, last), and those that lie inside
    it.
    """
    offset, (rows, *shape), (step, *stride) = view
    if step == 0:  # all rows are the same elements
        return range(rows), range(0)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    first = first - offset
    last = last - offset
    touched = range(max((first - span) // step + 1, 0), min(-(-last // step), rows))
    return touched, range(max(-(-first // step), 0), min((last - span) // step + 1, rows))


def parameter_storages(model: torch.nn.Module) -> frozenset[int]:
    """Return the memory of all parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(storage_key(tensor) for tensor in tensors if not tensor.is_meta and tensor.numel())


def _covers_once(views: list[View], elements: int) -> bool:
    """Return True if the views hold each of `elements` elements exactly once. Counted in cells as
    large as all offsets and contiguous runs allow: a cell is mostly a row or more.
    """
    runs = [_runs(view) for view in views if math.prod(view[1])]
    cell = math.gcd(
        elements, *(n for offset, shape, stride in runs for n in (offset, shape[-1], *stride[:-1]))
    )
    count = torch.zeros(elements // max(cell, 1), dtype=torch.int32)
    for offset, shape, stride in runs:
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if last >= elements or 0 in stride:
            return False
        steps = (*(s // cell for s in stride[:-1]), 1)
        count.as_strided((*shape[:-1], shape[-1] // cell), steps, offset // cell).add_(1)
    return bool((count == 1).all())


def _runs(view: View) -> View:
    """Return a view of the same elements with the contiguous ones in the last dimension, whose
    stride is 1.
    """
    offset, shape, stride = view
    dimensions = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
    run = 1
    while dimensions and dimensions[-1][0] == run:
        run *= dimensions.pop()[1]
    return offset, (*(n for _, n in dimensions), run), (*(s for s, _ in dimensions), 1)


_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
_Range = tuple[int, int, str, StorageWeakRef]  # first address, address behind the last, name, memory


@dataclass
class Written:
    """The number of elements of one storage that the loaders have written, and the weights they
    came from.
    """

    elements: int
    written: int = 0
    sources: list[str] = field(default_factory=list)
    reference: Any = None  # a weak reference keeps the key from being used again for another storage


class LoadWatcher(TorchDispatchMode):
    """An observer of the copies that loaders make, inside its `with` block, of the weights
    announced to `expect`.

    Attributes: read: names of weights that were copied somewhere. written: the elements written, by
        storage. recording: where copies and fills are noted down, if anywhere. comparing: copies
        are not made but compared with the present values; differences are in `different`. changed:
        names of weights whose loader changes the parameter after it has copied the weight, as vLLM
        does to keep -exp(A_log) (`composed_weight_loader` in
        vllm/model_executor/model_loader/weight_utils.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.written: dict[int, Written] = {}
        self.recording: Recording | None = None
        self.comparing = False
        self.different: set[str] = set()
        self.changed: set[str] = set()
        self._origins: dict[str, Origin] = {}  # of the weights being loaded
        self._ranges: list[_Range] = []  # their addresses, sorted
        # Storages computed from a weight, such as a cast of it
        self._derived: dict[int, tuple[str, Any]] = {}

    def expect(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Announce weights about to be loaded. Earlier weights in the same memory are forgotten.

        So are those whose memory is given back meanwhile: it may soon hold a loader's results for
        other weights.
        """
        self._origins = {
            n: Origin(storage_key(t), int(t.storage_offset()), t.numel()) for n, t in tensors
        }
        fresh = [
            (t.data_ptr(), t.data_ptr() + t.nbytes, name, StorageWeakRef(t.untyped_storage()))
            for name, t in tensors
            if t.numel()
        ]
        fresh.sort(key=itemgetter(0, 1, 2))
        kept = [earlier for earlier in self._ranges if not overlaps(fresh, *earlier[:2])]
        self._ranges = sorted(kept + fresh, key=itemgetter(0, 1, 2))

    def note_replayed(self, name: str, targets: Iterable[torch.Tensor]) -> None:
        """Note that a weight was copied to these targets without its loader."""
        self.read.add(name)
        for target in targets:
            self._note(target, name)

    def sources(self, tensor: torch.Tensor) -> list[str]:
        """Return the weights that were written to a tensor's memory."""
        entry = self.written.get(storage_key(tensor))
        return [] if entry is None else entry.sources

    def source_name(self, tensor: torch.Tensor) -> str | None:
        """Return the weight that a tensor is a view of, or was computed from."""
        if tensor.is_meta or tensor.numel() == 0:
            return None
        if (derived := self._derived.get(storage_key(tensor))) is not None:
            return derived[0]
        at = bisect.bisect_right(self._ranges, tensor.data_ptr(), key=itemgetter(0)) - 1
        if at < 0:
            return None
        _, last, name, memory = self._ranges[at]
        return name if tensor.data_ptr() < last and not memory.expired() else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self.source_name(args[1])) is not None:
            return self._copy(func, args[0], args[1], name)
        result = func(*args, **(kwargs or {}))
        if func in _FILLS:
            self._note(args[0], None)
            if self.recording is not None and not self.comparing:
                self.recording.note_fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
        elif func._schema.is_mutable:
            self._note_change([argument for argument in args if isinstance(argument, torch.Tensor)])
        elif isinstance(result, torch.Tensor):
            self._inherit(args, result)
        return result

    def _copy(self, func: Any, target: torch.Tensor, source: torch.Tensor, name: str) -> torch.Tensor:
        if target.is_meta:  # vLLM counting elements, nothing is loaded yet
            return func(target, source)
        if not self.comparing:
            self.read.add(name)
            self._note(target, name)
            if self.recording is not None:
                self.recording.note_copy(name, self._origins.get(name), source, target)
            return func(target, source)
        if not same_bits(target, source.to(target.dtype).expand_as(target)):
            self.different.add(name)
        return target

    def _note(self, target: torch.Tensor, name: str | None) -> None:
        storage = target.untyped_storage()
        if target.is_meta or not storage.nbytes():
            return
        if (entry := self.written.get(storage_key(target))) is None:
            if name is None:
                # Only the padding behind a loaded weight counts, and loaders fill it after the copy
                return
            entry = Written(storage.nbytes() // target.element_size(), reference=StorageWeakRef(storage))
            self.written[storage_key(target)] = entry
        entry.written += target.numel()
        if name is not None and name not in entry.sources:
            entry.sources.append(name)

    def _note_change(self, tensors: list[torch.Tensor]) -> None:
        """Note that a loader changes the first of these tensors in place, other than by copying a
        weight.
        """
        entry = self.written.get(storage_key(tensors[0])) if tensors and not tensors[0].is_meta else None
        names = set(entry.sources) if entry is not None else set()
        self.changed |= names
        if names and self.recording is not None and not self.recording.complete:
            self.recording.distrust(names, CHANGED)

    def _inherit(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        if self.source_name(result) is not None:
            return
        for argument in args:
            if isinstance(argument, torch.Tensor) and (name := self.source_name(argument)) is not None:
                self._derived[storage_key(result)] = (name, StorageWeakRef(result.untyped_storage()))
                return


def overlaps(ranges: Sequence[tuple[int, int, *tuple[Any, ...]]], first: int, last: int) -> bool:
    """Return True if some of the numbers [first, last) are in one of these ranges, which are in
    order and apart.
    """
    at = bisect.bisect_left(ranges, last, key=itemgetter(0))  # the first that starts behind them
    return at > 0 and ranges[at - 1][1] > first


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if both hold the same bits.
    Aligned memory is compared by words of 8 bytes: several times as fast as bfloat16, and NaN
    equals NaN.
    """
    words = [
        t for t in (first, second) if t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0
    ]
    if len(words) == 2:
        first, second = (t.view(-1).view(torch.int64) for t in words)
    return torch.equal(first, second)
