"""Between right-padded batches and single requests: a batch taken apart, and its answers put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..sampling import Completion
from .batch import BatchedDataDict, verify_right_padding
from .specs import GenerationDatumSpec, GenerationOutputSpec


@dataclass(frozen=True)
class Row:
    """One sample of a batch: its place there, its prompt without padding, and the stop strings it brought."""

    index: int
    token_ids: list[int]
    stop: list[str]


def rows_of(data: BatchedDataDict[GenerationDatumSpec], pad_value: int) -> list[Row]:
    """The samples of a batch of `input_ids` and `input_lengths`.

    Raises:
        ValueError: a key is missing, the padding is not on the right, or there is not one entry a sample.
    """
    if missing := [key for key in ("input_ids", "input_lengths") if key not in data]:
        raise ValueError(
            f"generation needs {' and '.join(missing)} in its batch, which has {', '.join(data) or 'none'}"
        )
    verify_right_padding(data, pad_value, raise_error=True)
    stops = stop_strings_of(data, data.size)
    lengths = data["input_lengths"].tolist()
    prompts = [ids[:length] for ids, length in zip(data["input_ids"].tolist(), lengths, strict=True)]
    return [Row(i, ids, stop) for i, (ids, stop) in enumerate(zip(prompts, stops, strict=True))]


def stop_strings_of(data: Mapping[str, Any], size: int) -> list[list[str]]:
    """Each sample's own stop strings; none where the batch, or the sample, has none."""
    stops = data.get("stop_strings") or [None] * size
    if any(isinstance(stop, str) for stop in stops) or len(stops) != size:
        raise ValueError(f"stop_strings must hold a list of strings, or None, for each of the {size} samples")
    return [list(stop or ()) for stop in stops]


def padded_output(
    data: BatchedDataDict[GenerationDatumSpec], completions: Sequence[Completion], pad_value: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """What was generated for the rows of `data`, in their order: as wide as the input and the longest response."""
    input_ids, input_lengths = data["input_ids"].cpu(), data["input_lengths"].cpu().long()
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
        {
            "output_ids": output_ids,
            "generation_lengths": counts,
            "unpadded_sequence_lengths": input_lengths + counts,
            "logprobs": logprobs,
            "truncated": torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool),
            "errors": [c.error for c in completions],
        }
    )


def sequence_output(
    data: BatchedDataDict[GenerationDatumSpec], row: Row, completion: Completion, pad_value: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """The output of one row of `data` by itself, without padding: prompt and response side by side."""
    length = len(row.token_ids)
    alone = BatchedDataDict[GenerationDatumSpec](
        {"input_ids": data["input_ids"][row.index : row.index + 1, :length], "input_lengths": torch.tensor([length])}
    )
    return padded_output(alone, [completion], pad_value)


def texts_of(data: Mapping[str, Any], has_tokenizer: bool) -> list[str]:
    """The prompts of a batch of texts.

    Raises:
        ValueError: there are none, they are not texts, or nobody could tell their tokens.
    """
    prompts = data.get("prompts")
    if not isinstance(prompts, list) or any(not isinstance(prompt, str) for prompt in prompts):
        raise ValueError("generation from texts needs `prompts` in its batch, a list of strings")
    if not has_tokenizer:
        raise ValueError("texts need the tokenizer: set vllm_cfg.skip_tokenizer_init to false")
    return prompts


def text_output(answers: Sequence[tuple[str, str]]) -> BatchedDataDict[Any]:
    """Responses and errors side by side."""
    return BatchedDataDict({"texts": [text for text, _ in answers], "errors": [error for _, error in answers]})
