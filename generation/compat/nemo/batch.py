"""The right-padded batches of NeMo RL's generation, and their conversion to single requests and
back.
"""

import copy
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NotRequired, Self, TypedDict, TypeVar

import torch
from torch.nn.functional import pad

from generation.exact_ids import Generation

Spec = TypeVar("Spec")

_EXTRA = "__extra__"
"""The key of a batch whose value has no entries for samples; methods leave it as it is."""


class ColocatedConfig(TypedDict):
    """The section `colocated`. If engine and trainer share their devices, the engine sleeps between
    generations.
    """

    enabled: bool
    # gpus_per_node, num_nodes of engines on devices without a trainer
    resources: NotRequired[dict[str, int | None]]


class GenerationConfig(TypedDict):
    """The configuration of generation that all backends share."""

    backend: str
    model_name: str
    max_new_tokens: int
    temperature: float
    top_p: NotRequired[float]  # 1.0 truncates nothing
    top_k: NotRequired[int | None]  # None and -1 truncate nothing
    stop_token_ids: NotRequired[list[int] | None]
    stop_strings: NotRequired[list[str] | None]  # for all samples, in addition to those of a sample
    pad_token_id: NotRequired[int]  # the id that pads rows; 0 by default
    colocated: NotRequired[ColocatedConfig]


def pad_token_id(config: Mapping[str, Any]) -> int:
    """Return the id that pads rows: `pad_token_id`, `_pad_token_id` (NeMo RL's name for it), or
    0.
    """
    token_id = config.get("pad_token_id", config.get("_pad_token_id"))
    return 0 if token_id is None else token_id


class GenerationDatumSpec(TypedDict):
    """The fields of a batch of prompts."""

    input_ids: torch.Tensor  # [B, S], right-padded integers
    input_lengths: torch.Tensor  # [B]
    stop_strings: NotRequired[list[list[str] | None]]  # by sample; None for a sample without any
    __extra__: NotRequired[Any]


class GenerationOutputSpec(TypedDict):
    """The fields of a generated batch, on the CPU. The row of a sample with an error has the prompt
    only.
    """

    # [B, S + the longest response], the input's dtype: prompt, response, padding
    output_ids: torch.Tensor
    generation_lengths: torch.Tensor  # [B] int64, tokens of the response
    unpadded_sequence_lengths: torch.Tensor  # [B] int64, tokens of prompt and response together
    # As output_ids, float32: the log-probability (nats) of the token at the same place under the
    # distribution it was drawn from; 0 on prompt and padding.
    logprobs: torch.Tensor
    # [B] bool, True where the response was cut at the longest length or the end of the context
    truncated: torch.Tensor
    errors: list[str]  # [B], empty for a sample without an error
    __extra__: NotRequired[Any]


class BatchedDataDict(UserDict[str, Any], Generic[Spec]):
    """A batch: tensors and lists by name, with one entry per sample. All methods except `to` return
    a new batch.
    """

    @property
    def size(self) -> int:
        """The number of samples; 0 for a batch without keys. Raises ValueError with the lengths
        where they differ.
        """
        lengths = {key: len(value) for key, value in self.data.items() if key != _EXTRA}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values of a batch must be equally long, these are: {lengths}")
        return next(iter(lengths.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate batches. Tensors of two or more dimensions are padded on the right of
        dimension 1, with the value in `pad_value_dict` or 0. Raises KeyError for a key that only
        some of the non-empty batches have. `__extra__` is left out.
        """
        stripped = []
        for batch in batches:
            stripped.append({key: value for key, value in batch.items() if key != _EXTRA})
        filled = [batch for batch in stripped if batch]
        for key in sorted({key for batch in filled for key in batch}):
            if lacking := [i for i, batch in enumerate(stripped) if batch and key not in batch]:
                raise KeyError(f"key {key!r} is missing from non-empty batches {lacking}")
        pads = pad_value_dict or {}
        joined = {}
        for key in filled[0] if filled else ():
            joined[key] = _joined([batch[key] for batch in filled], pads.get(key, 0))
        return cls(joined)

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return the samples at `indices`, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.long).tolist()
        if outside := [i for i in rows if not 0 <= i < self.size]:
            raise IndexError(f"a batch of {self.size} samples has none at {outside}")
        return self._of(
            lambda value: value[rows] if isinstance(value, torch.Tensor) else [value[i] for i in rows]
        )

    def slice(self, start: int, end: int) -> Self:
        """Return the samples from `start` up to, but not including, `end`; both must be within the
        batch.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"samples {start} to {end} are not within a batch of {self.size} samples")
        return self._of(lambda value: value[start:end])

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return the `rank`-th of `chunks` equal parts."""
        if chunks < 1 or self.size % chunks or not 0 <= rank < chunks:
            raise ValueError(f"there is no part {rank} of {chunks} equal parts of {self.size} samples")
        return self.get_batch(rank, self.size // chunks)

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[Self]:
        """Cut each run of `batch_size` samples (None: all) into `shards` parts. Shard k has the
        k-th part of each run.

        Raises ValueError for sizes that do not divide. With `allow_uneven_shards`, a part has
        ceil(size / shards) samples; the last parts have fewer, or none.
        """
        if allow_uneven_shards and batch_size is not None:
            raise ValueError(
                "shards of uneven size are always cut from the complete batch: leave batch_size out"
            )
        size = self.size if batch_size is None else batch_size
        divides = self.size == 0 or (size > 0 and self.size % size == 0 and size % shards == 0)
        if shards < 1 or not (allow_uneven_shards or divides):
            raise ValueError(
                f"{self.size} samples in batches of {size} cannot be cut into {shards} equal shards"
            )
        width = max(1, -(-size // shards))
        rows_of_shards: list[list[int]] = [[] for _ in range(shards)]
        for i in range(self.size):
            rows_of_shards[i % max(1, size) // width].append(i)
        return [self.select_indices(rows) for rows in rows_of_shards]

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Move sample i to place `order[i]`, which undoes `select_indices(order)`. `order` has each
        place once.
        """
        if sorted(order) != list(range(self.size)):
            raise ValueError(
                f"the new places of {self.size} samples must be 0 to {self.size - 1}, each once"
            )
        return self.select_indices(torch.argsort(torch.tensor(order, dtype=torch.long)))

    def repeat_interleave(self, count: int) -> Self:
        """Repeat every sample `count` times in a row; entries of lists are copied."""

        def repeated(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.repeat_interleave(count, dim=0)
            return [copy.deepcopy(item) for item in value for _ in range(count)]

        return self._of(repeated)

    def truncate_tensors(self, dim: int, length: int) -> Self:
        """Cut tensors that have a dimension `dim` to `length` in it. `dim` must be at least 1."""
        if dim < 1 or length < 0:
            raise ValueError(
                f"dimension {dim} cannot be cut to {length}: dim must be at least 1, length at least 0"
            )

        def cut(value: Any) -> Any:
            has = isinstance(value, torch.Tensor) and value.dim() > dim
            return value.narrow(dim, 0, min(length, value.shape[dim])) if has else value

        return self._of(cut)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Yield consecutive parts of `microbatch_size` samples, which must divide the batch."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise ValueError(
                f"{self.size} samples cannot be cut into micro-batches of {microbatch_size}"
            )
        return (self.get_batch(part, microbatch_size) for part in range(self.size // microbatch_size))

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Return the `batch_idx`-th part of `batch_size` samples."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors, in place."""
        self.data |= {
            key: value.to(device) for key, value in self.data.items() if isinstance(value, torch.Tensor)
        }
        return self

    def _of(self, part: Callable[[Any], Any]) -> Self:
        return type(self)(
            {key: value if key == _EXTRA else part(value) for key, value in self.data.items()}
        )


Prompts = BatchedDataDict[GenerationDatumSpec]
Responses = BatchedDataDict[GenerationOutputSpec]
Texts = BatchedDataDict[Any]


def _joined(values: Sequence[Any], padding: float) -> Any:
    """Join lists into one list, or tensors into one tensor, each padded in dimension 1 to the
    widest.
    """
    if not isinstance(values[0], torch.Tensor):
        return [item for value in values for item in value]
    if values[0].dim() < 2:
        return torch.cat(list(values))
    width = max(value.shape[1] for value in values)
    unchanged = [0, 0] * (values[0].dim() - 2)
    return torch.cat(
        [pad(value, [*unchanged, 0, width - value.shape[1]], value=padding) for value in values]
    )


class GenerationInterface(ABC):
    """A generation backend. Failures are raised, so methods with a bool result always return
    True.
    """

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[Future[None]]:
        """Start to join the group in which weights are broadcast. Wait for the futures while
        trainer ranks join.
        """

    @abstractmethod
    def generate(self, data: Prompts, greedy: bool = False) -> Responses:
        """Return one response to every prompt, in the order of the prompts; an empty batch gives an
        empty batch.
        """

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Allocate the memory for generation. Do almost nothing when it is allocated already."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release memory, and drop caches that were computed with the current weights."""

    def shutdown(self) -> bool:
        """Stop everything that was started; safe to call twice."""
        return True

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce the weights that will come: name -> (shape, dtype)."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights while it is running")

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        """Start to receive weights from trainer ranks on the same devices. Return one future per
        engine.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights from its own device")

    def update_weights_from_collective(self) -> list[Future[bool]]:
        """Start to receive weights by broadcast, in the group of `init_collective`. Return one
        future per engine.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no weights by broadcast")


def verify_right_padding(
    data: BatchedDataDict[Any], pad_value: int = 0, raise_error: bool = False
) -> tuple[bool, str | None]:
    """Return (True, None) if every row has only `pad_value` after its length, else (False, the
    problem).

    Checks `input_ids` [B, S] with `input_lengths` [B], or else `output_ids` with
    `unpadded_sequence_lengths`. Tokens within the length may be `pad_value`, too. With
    `raise_error`, raises ValueError with the problem. Raises TypeError where `data` is not a batch
    or `pad_value` is None.
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
    pairs = ("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths")
    pair = next((pair for pair in pairs if pair[0] in data and pair[1] in data), None)
    if pair is None:
        wanted = "(input_ids, input_lengths) or (output_ids, unpadded_sequence_lengths)"
        return f"could not find {wanted}; the keys are {', '.join(data) or 'none'}"
    ids = data[pair[0]]
    lengths = data[pair[1]]
    for name, value, dim in (pair[0], ids, 2), (pair[1], lengths, 1):
        if not isinstance(value, torch.Tensor) or value.dim() != dim or value.is_floating_point():
            form = type(value).__name__
            if isinstance(value, torch.Tensor):
                form = f"{value.dtype} {list(value.shape)}"
            return (
                f"{name} must be a tensor of integers with {dim} dimension{'s'[: dim - 1]}, not {form}"
            )
    if len(ids) != len(lengths):
        return (
            f"{pair[0]} has {len(ids)} rows, {pair[1]} has {len(lengths)} entries: they must be equally "
            "many"
        )
    # One comparison for the whole batch; single rows are read only to describe the first problem.
    width = ids.shape[1]
    lengths = lengths.to(ids.device)
    stray = (ids != pad_value) & (torch.arange(width, device=ids.device) >= lengths[:, None])
    bad = (lengths < 0) | (lengths > width) | stray.any(dim=1)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0])
    length = int(lengths[row])
    if length < 0:
        return f"length {length} at index {row} is negative"
    if length > width:
        return f"length {length} at index {row} exceeds the tensor's width {width}"
    positions = stray[row].nonzero().flatten().tolist()
    return (
        f"tokens other than the padding {pad_value} after the length {length} at index {row}: positions "
        f"{positions}"
    )


@dataclass(frozen=True)
class Row:
    """One sample of a batch: its index there, its prompt as token ids or as text, and its stop
    strings.
    """

    index: int
    token_ids: list[int]
    stop: list[str]
    text: str = ""


def rows_of(data: Prompts, pad_value: int) -> list[Row]:
    """Return the samples of a batch of ids, without padding. Raises ValueError for a missing key or
    wrong padding.
    """
    if missing := [key for key in ("input_ids", "input_lengths") if key not in data]:
        has = ", ".join(data) or "none"
        raise ValueError(f"generation needs {' and '.join(missing)} in its batch, which has {has}")
    verify_right_padding(data, pad_value, raise_error=True)
    lengths = data["input_lengths"].tolist()
    stops = _stop_strings(data, len(lengths))
    rows = zip(data["input_ids"].tolist(), lengths, stops, strict=True)
    return [Row(index, ids[:length], stop) for index, (ids, length, stop) in enumerate(rows)]


def text_rows(data: Mapping[str, Any], has_tokenizer: bool) -> list[Row]:
    """Return the samples of a batch of texts, `prompts`. Raises ValueError if these or the
    tokenizer are missing.
    """
    prompts = data.get("prompts")
    if not isinstance(prompts, list) or any(not isinstance(prompt, str) for prompt in prompts):
        raise ValueError("generation from texts needs `prompts` in its batch, a list of strings")
    if not has_tokenizer:
        raise ValueError("texts need the tokenizer: set vllm_cfg.skip_tokenizer_init to false")
    stops = _stop_strings(data, len(prompts))
    return [
        Row(index, [], stop, text) for index, (text, stop) in enumerate(zip(prompts, stops, strict=True))
    ]


def _stop_strings(data: Mapping[str, Any], size: int) -> list[list[str]]:
    """Return each sample's stop strings, empty where the batch or the sample has none."""
    stops = data.get("stop_strings") or [None] * size
    if any(isinstance(stop, str) for stop in stops) or len(stops) != size:
        raise ValueError(
            f"stop_strings must hold a list of strings, or None, for each of the {size} samples"
        )
    return [list(stop or ()) for stop in stops]


def padded_output(data: Prompts, completions: Sequence[Generation], pad_value: int) -> Responses:
    """Return the batch of responses to the rows of `data`, as wide as the input plus the longest
    response.
    """
    input_ids = data["input_ids"].cpu()
    input_lengths = data["input_lengths"].cpu().long()
    counts = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.long)
    width = input_ids.shape[1] + max((len(c.token_ids) for c in completions), default=0)
    output_ids = input_ids.new_full((len(completions), width), pad_value)
    logprobs = torch.zeros(len(completions), width)
    for row, (completion, start) in enumerate(zip(completions, input_lengths.tolist(), strict=True)):
        end = start + len(completion.token_ids)
        output_ids[row, :start] = input_ids[row, :start]
        output_ids[row, start:end] = torch.tensor(completion.token_ids, dtype=output_ids.dtype)
        logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return BatchedDataDict(
        output_ids=output_ids,
        generation_lengths=counts,
        unpadded_sequence_lengths=input_lengths + counts,
        logprobs=logprobs,
        truncated=torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
        errors=[c.error for c in completions],
    )


def sequence_output(data: Prompts, row: Row, completion: Generation, pad_value: int) -> Responses:
    """Return the output of one row of `data` without padding: the prompt followed by the
    response.
    """
    length = len(row.token_ids)
    ids = data["input_ids"][row.index : row.index + 1, :length]
    return padded_output(
        Prompts(input_ids=ids, input_lengths=torch.tensor([length])), [completion], pad_value
    )


def text_output(answers: Sequence[tuple[str, str]]) -> Texts:
    """Return a batch of responses and errors."""
    return BatchedDataDict(texts=[text for text, _ in answers], errors=[error for _, error in answers])
