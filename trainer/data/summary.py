"""A short summary of prompts: their lengths, the first one, and those that occur twice."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from generation.images import StoredImage
from trainer.data.prompts import Prompt
from trainer.errors import counted, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BINS = 8  # of the histogram of lengths
_ROWS_NAMED = 3  # in a sentence
_TEXT_SHOWN = 160  # characters of the first prompt


@dataclass(frozen=True)
class TokenLengths:
    """The lengths of rows in tokens: quantiles by nearest rank, and a histogram.

    Attributes: histogram: number of rows in each of 8 bins that are `width` tokens wide, the first
        from 1 to `width`.
    """

    least: int
    median: int
    p95: int
    longest: int
    width: int
    histogram: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "TokenLengths":
        """Return the figures of these lengths, of which there is at least one."""
        ordered = np.sort(np.asarray(lengths))
        width = max(1, -(-int(ordered[-1]) // _BINS))
        bins = np.maximum(ordered - 1, 0) // width
        ranks = [max(0, -(-len(ordered) * percent // 100) - 1) for percent in (0, 50, 95, 100)]
        least, median, p95, longest = (int(ordered[nearest]) for nearest in ranks)
        return cls(least, median, p95, longest, width, np.bincount(bins, minlength=_BINS).tolist())

    def __str__(self) -> str:
        return (
            f"from {self.least:,} to {self.longest:,} tokens, median {self.median:,}, p95 {self.p95:,}"
        )


def prompt_lines(
    prompts: Sequence[Prompt],
    held_outs: Mapping[str, Sequence[Prompt]],
    tokenizer: "PreTrainedTokenizerBase",
) -> Iterator[str]:
    """Yield the short form of a survey: the lengths of a run's prompts, the first one, and those
    that occur twice.
    """
    lengths = TokenLengths.of([len(prompt.token_ids) for prompt in prompts])
    text = tokenizer.decode(prompts[0].token_ids)
    yield f"prompts have {lengths}"
    yield f"the first prompt is {shortened(repr(text), _TEXT_SHOWN)}"
    first_rows: dict[bytes, int] = {}
    duplicates = []
    for prompt in prompts:
        first = first_rows.setdefault(shown_key(prompt.token_ids, prompt.images), prompt.id)
        if first != prompt.id:
            duplicates.append((prompt.id, first))
    if duplicates:
        yield duplicates_line(duplicates)
    for name, held_out in held_outs.items():
        keys = {shown_key(prompt.token_ids, prompt.images) for prompt in held_out}
        if rows := sorted(first_rows[key] for key in keys & first_rows.keys()):
            yield shared_line(name, rows)


def duplicates_line(duplicates: Sequence[tuple[int, int]]) -> str:
    """Return a sentence about rows that occur twice, as pairs of a row and the first one like
    it.
    """
    row, first = duplicates[0]
    return (
        f"{counted(len(duplicates), 'duplicate')} among the rows, such as row {row}, which is like row "
        f"{first}"
    )


def shared_line(name: str, rows: Sequence[int]) -> str:
    """Return a sentence about rows of the training data that are in the evaluation dataset `name`,
    too.
    """
    return (
        f"eval.datasets.{name} has {counted(len(rows), 'prompt')} of the training data: "
        f"{named_rows(rows)}"
    )


def named_rows(rows: Sequence[int]) -> str:
    """Name some of these rows: row 4; rows 4 and 6; rows 4, 6, 9 and 12 more."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    names = [str(row) for row in rows[:_ROWS_NAMED]]
    if len(rows) > _ROWS_NAMED:
        return f"rows {', '.join(names)} and {len(rows) - _ROWS_NAMED:,} more"
    return f"rows {', '.join(names[:-1])} and {names[-1]}"


def shown_key(token_ids: Iterable[int], images: Iterable[StoredImage]) -> bytes:
    """Return a digest of what the model is shown."""
    digest = hashlib.blake2b(np.fromiter(token_ids, np.int32).tobytes(), digest_size=16)
    for image in images:
        digest.update(image.digest.encode())
    return digest.digest()
