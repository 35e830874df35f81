"""Watches vLLM's own loaders at work, and so knows which weight went where without knowing any model.

Every loader ends in `copy_` from (a view of) the tensor it was given into (a view of) a parameter. A dispatch mode sees
those copies. From them follows whether each weight was read by somebody and each parameter written in full, on every
worker and on every sync; and by comparing instead of copying, whether the engine holds what the trainer
has.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import Origin, Recording, storage_key

_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


_Range = tuple[int, int, str]  # first address, address behind the last, name


@dataclass
class Written:
    """How much of one storage the loaders have written, and from which weights."""

    elements: int
    written: int = 0
    sources: list[str] = field(default_factory=list)
    reference: Any = None  # a weak reference keeps the key from being used again for another storage


class LoadWatcher(TorchDispatchMode):
    """Between `with` and its end, notes what loaders do with the weights that `expect` announced.

    Attributes:
        read: names of weights that were copied somewhere.
        written: what was written, by storage.
        recording: where copies and fills are noted down, if anywhere.
        comparing: copies are not made but compared with what is there; differences are in `different`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.written: dict[int, Written] = {}
        self.recording: Recording | None = None
        self.comparing = False
        self.different: set[str] = set()
        self._origins: dict[str, Origin] = {}  # of the weights being loaded
        self._ranges: list[_Range] = []  # their addresses, sorted
        self._derived: dict[int, tuple[str, Any]] = {}  # storages computed from a weight, such as a cast of it

    def expect(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Announce weights about to be loaded; earlier ones whose memory they took over are forgotten."""
        self._origins = {name: Origin.of(tensor) for name, tensor in tensors}
        fresh = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors if t.numel())
        self._ranges = sorted([r for r in self._ranges if not _overlaps(r, fresh)] + fresh)

    def note_replayed(self, name: str, targets: Iterable[torch.Tensor]) -> None:
        """A weight was copied to these targets without its loader."""
        self.read.add(name)
        for target in targets:
            self._note(target, name)

    def source_name(self, tensor: torch.Tensor) -> str | None:
        """The weight that a tensor is a view of, or was computed from."""
        if tensor.is_meta or tensor.numel() == 0:
            return None
        if (derived := self._derived.get(storage_key(tensor))) is not None:
            return derived[0]
        at = bisect.bisect_right(self._ranges, (tensor.data_ptr(), float("inf"), "")) - 1
        return self._ranges[at][2] if at >= 0 and tensor.data_ptr() < self._ranges[at][1] else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self.source_name(args[1])) is not None:
            return self._copy(func, args[0], args[1], name)
        result = func(*args, **(kwargs or {}))
        if func in _FILLS:
            self._note(args[0], None)
            if self.recording is not None and not self.comparing:
                self.recording.note_fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
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
        if not _same_bits(target, source.to(target.dtype).expand_as(target)):
            self.different.add(name)
        return target

    def _note(self, target: torch.Tensor, name: str | None) -> None:
        storage = target.untyped_storage()
        if target.is_meta or not storage.nbytes():
            return
        entry = self.written.get(storage_key(target))
        if entry is None:
            if name is None:
                return  # only the padding behind a loaded weight counts, and loaders fill it after the copy
            entry = Written(storage.nbytes() // target.element_size(), reference=StorageWeakRef(storage))
            self.written[storage_key(target)] = entry
        entry.written += target.numel()
        if name is not None and name not in entry.sources:
            entry.sources.append(name)

    def _inherit(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        if self.source_name(result) is not None:
            return
        for argument in args:
            if isinstance(argument, torch.Tensor) and (name := self.source_name(argument)) is not None:
                storage = result.untyped_storage()
                self._derived[storage_key(result)] = (name, StorageWeakRef(storage))
                return


def _overlaps(old: _Range, fresh: list[_Range]) -> bool:
    """Whether memory of a weight that was announced before now belongs to one of the sorted `fresh` ones."""
    at = bisect.bisect_left(fresh, (old[1], 0, ""))  # the first that starts behind the old one
    return at > 0 and fresh[at - 1][1] > old[0]


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal; by whole words where they lie so, which is several times
    as fast as bfloat16 and finds NaN equal to itself."""
    words = [t for t in (first, second) if t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0]
    if len(words) == 2:
        first, second = (t.view(-1).view(torch.int64) for t in words)
    return torch.equal(first, second)
