"""Batches as dictionaries whose values all have one entry a sample, and the check that they are padded on the right."""

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch

Spec = TypeVar("Spec")

_LENGTHS = {"input_ids": "input_lengths", "output_ids": "unpadded_sequence_lengths"}


class BatchedDataDict(UserDict[str, Any], Generic[Spec]):
    """A batch: tensors and lists by name, all with the same number of entries, the samples, in their first dimension.

    `BatchedDataDict[GenerationDatumSpec]` says which names there are. Every method but `to` leaves its batch as it is.
    """

    @property
    def size(self) -> int:
        """How many samples there are; 0 for a batch without keys.

        Raises:
            ValueError: values of different lengths, naming them.
        """
        lengths = {key: len(value) for key, value in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values of a batch must be equally long, these are: {lengths}")
        return next(iter(lengths.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """One batch after the other. Tensors of two and more dimensions are padded on the right of dimension 1.

        Args:
            pad_value_dict: what to pad each key with; 0 where it does not say.

        Raises:
            KeyError: a key that some batches have and others, not empty, lack.
        """
        filled = [batch for batch in batches if len(batch)]
        for key in sorted({key for batch in filled for key in batch}):
            if lacking := [i for i, batch in enumerate(batches) if len(batch) and key not in batch]:
                raise KeyError(f"key {key!r} is missing from non-empty batches {lacking}")
        pads = pad_value_dict or {}
        return cls({key: _joined([b[key] for b in filled], pads.get(key, 0)) for key in (filled[0] if filled else ())})

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The samples at `indices`, in that order."""
        places = torch.as_tensor(indices, dtype=torch.long).tolist()
        if outside := [i for i in places if not 0 <= i < self.size]:
            raise IndexError(f"a batch of {self.size} samples has none at {outside}")
        return self._of(lambda value: value[places] if isinstance(value, torch.Tensor) else [value[i] for i in places])

    def slice(self, start: int, end: int) -> Self:
        """Samples `start` to `end`, the latter not included; both must lie within the batch."""
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"samples {start} to {end} of a batch of {self.size}")
        return self._of(lambda value: value[start:end])

    def chunk(self, rank: int, chunks: int) -> Self:
        """The `rank`-th of `chunks` equal parts."""
        if chunks < 1 or self.size % chunks or not 0 <= rank < chunks:
            raise ValueError(f"there is no part {rank} of {chunks} equal parts of {self.size} samples")
        width = self.size // chunks
        return self.slice(rank * width, (rank + 1) * width)

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[Self]:
        """Cut every `batch_size` consecutive samples (all of them if None) into `shards` consecutive parts; shard k has
        the k-th part of each.

        With `allow_uneven_shards` the parts hold ceil(size / shards) samples, the last ones fewer, or none.

        Raises:
            ValueError: sizes that do not divide.
        """
        if allow_uneven_shards and batch_size is not None:
            raise ValueError("shards of uneven size are cut from the whole batch: leave batch_size out")
        whole = self.size if batch_size is None else batch_size
        divides = whole > 0 and self.size % whole == 0 and whole % shards == 0 if self.size else True
        if shards < 1 or not (allow_uneven_shards or divides):
            raise ValueError(f"{self.size} samples in batches of {whole} cannot be cut into {shards} equal shards")
        width = max(1, -(-whole // shards))
        places = range(self.size)
        return [
            self.select_indices([i for i in places if i % max(1, whole) // width == shard]) for shard in range(shards)
        ]

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Sample i moves to place `order[i]`: undoes a `select_indices(order)`.

        Raises:
            ValueError: `order` does not hold every place once.
        """
        if sorted(order) != list(range(self.size)):
            raise ValueError(f"the new places of {self.size} samples must be 0 to {self.size - 1}, each once")
        return self.select_indices(torch.argsort(torch.tensor(order, dtype=torch.long)))

    def repeat_interleave(self, count: int) -> Self:
        """Every sample `count` times in a row; what lists hold is copied."""

        def repeated(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.repeat_interleave(count, dim=0)
            return [copy.deepcopy(item) for item in value for _ in range(count)]

        return self._of(repeated)

    def truncate_tensors(self, dim: int, length: int) -> Self:
        """Tensors that have dimension `dim`, cut to `length` in it; a negative `dim` does not count from the end."""
        if dim < 1 or length < 0:
            raise ValueError(f"dimension {dim} cannot be cut to {length}: dimension 0 is the samples'")
        return self._of(
            lambda value: (
                value.narrow(dim, 0, min(length, value.shape[dim]))
                if isinstance(value, torch.Tensor) and value.dim() > dim
                else value
            )
        )

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Consecutive parts of `microbatch_size` samples, which must divide the batch."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise ValueError(f"{self.size} samples cannot be cut into micro-batches of {microbatch_size}")
        return (self.slice(start, start + microbatch_size) for start in range(0, self.size, microbatch_size))

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """The `batch_idx`-th part of `batch_size` samples."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    def _of(self, part: Any) -> Self:
        return type(self)({key: part(value) for key, value in self.data.items()})


def _joined(values: Sequence[Any], pad: float) -> Any:
    """Lists as one list, tensors as one tensor, each padded in dimension 1 to the widest."""
    if not isinstance(values[0], torch.Tensor):
        return [item for value in values for item in value]
    if values[0].dim() < 2:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    return torch.cat([_widened(value, width, pad) for value in values])


def _widened(value: torch.Tensor, width: int, pad: float) -> torch.Tensor:
    wide = value.new_full((value.shape[0], width, *value.shape[2:]), pad)
    wide[:, : value.shape[1]] = value
    return wide


def verify_right_padding(
    data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = False
) -> tuple[bool, str | None]:
    """Whether every row holds `pad_value` alone to the right of its length.

    Looks at `input_ids` [B, S] with `input_lengths` [B], or else at `output_ids` with `unpadded_sequence_lengths`.
    What stands left of the length is not looked at: it may hold `pad_value`, too.

    Returns:
        (True, None), or (False, what is wrong).

    Raises:
        ValueError: what is wrong, with `raise_error`.
        TypeError: not a batch, or no pad value.
    """
    if not isinstance(data, BatchedDataDict):
        raise TypeError(f"data must be a BatchedDataDict, not {type(data).__name__}")
    if pad_value is None:
        raise TypeError("pad_value must be a token id, not None")
    problem = _padding_problem(data, pad_value)
    if problem is not None and raise_error:
        raise ValueError(problem)
    return problem is None, problem


def _padding_problem(data: Mapping[str, Any], pad_value: int) -> str | None:
    pair = next(((ids, lengths) for ids, lengths in _LENGTHS.items() if ids in data and lengths in data), None)
    if pair is None:
        return (
            "could not find (input_ids, input_lengths) or (output_ids, unpadded_sequence_lengths); "
            f"the keys are {_listed(data)}"
        )
    ids, lengths = data[pair[0]], data[pair[1]]
    return _shape_problem(pair, ids, lengths) or _content_problem(ids, lengths, pad_value)


def _shape_problem(pair: tuple[str, str], ids: Any, lengths: Any) -> str | None:
    for name, value, dim in (pair[0], ids, 2), (pair[1], lengths, 1):
        if not isinstance(value, torch.Tensor) or value.dim() != dim or value.is_floating_point():
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            return f"{name} must be a tensor of integers with {dim} dimension{'s'[: dim - 1]}, not {found}"
    if len(ids) != len(lengths):
        return f"{pair[0]} has {len(ids)} rows, {pair[1]} has {len(lengths)} entries: they must be equally many"
    return None


def _content_problem(ids: torch.Tensor, lengths: torch.Tensor, pad_value: int) -> str | None:
    """One comparison over the whole batch; rows are looked at only to word the first problem."""
    lengths, width = lengths.to(ids.device), ids.shape[1]
    wrong = (lengths < 0) | (lengths > width)
    stray = (ids != pad_value) & (torch.arange(width, device=ids.device) >= lengths[:, None])
    bad = wrong | stray.any(dim=1)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0])
    length = int(lengths[row])
    if length < 0:
        return f"length {length} at index {row} is negative"
    if length > width:
        return f"length {length} at index {row} exceeds the tensor's width {width}"
    positions = stray[row].nonzero().flatten().tolist()
    return f"tokens other than the padding {pad_value} after the length {length} at index {row}: positions {positions}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
