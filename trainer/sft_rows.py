"""Make the transcripts that a warm start learns: tokenised rows, with a mask of the assistant's
tokens.

A row is a conversation in `data.messages_key`, all assistant turns of which are trained on, or a
prompt (string or messages) with its completion in `sft.completion_key`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from generation.images import Image, ImageProcessor, ImageRules, StoredImage
from generation.messages import CleanMessage, clean_messages, messages_in, plain_ids
from trainer.chat_template import end_tokens
from trainer.config.schema import HeldOutConfig, TrainConfig
from trainer.data import (
    Remarks,
    RenderedRow,
    RowReader,
    check_preferences,
    columns_read,
    encoded_images,
    in_chunks,
    load_rows,
    messages_and_images,
    require_embedded,
    row_images,
    row_reader,
    stored_images,
    unembedded,
)
from trainer.errors import UserError
from trainer.rollouts.level import RolloutLevel
from trainer.types import Sample

if TYPE_CHECKING:
    from datasets import Dataset

Pieces = list[tuple[str, bool]]
"""The pieces of a transcript's text in order, each with True if the assistant wrote it."""


@dataclass
class Transcript(Sample):
    """A conversation; its images are read at the time, and on the rank, of its training."""

    stored: tuple[StoredImage, ...] = ()

    def with_images(self) -> Sample:
        """Return a copy with its images read. Raises UserError if an image has changed since it was
        loaded.
        """
        if not self.stored:
            return self
        try:
            return replace(self, images=tuple(image.read() for image in self.stored))
        except ValueError as error:
            raise UserError(str(error)) from error


@dataclass
class Transcripts:
    """Tokenised conversations; `dropped` counts rows that were too long."""

    samples: list["Transcript"]
    dropped: int
    remarks: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """Return a digest of all tokens and masks; a position in the data is valid only in data
        with the same digest.
        """
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            digest.update(np.array([sample.input_ids, sample.loss_mask], np.int32).tobytes())
            digest.update("".join(image.digest for image in sample.stored).encode())
            digest.update(b"/")
        return digest.hexdigest()


def load_transcripts(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutConfig | None = None
) -> Transcripts:
    """Load the training rows, or those of `held_out`, as samples.

    Rows with more than data.max_prompt_tokens + sft.max_tokens tokens are dropped and counted.
    Raises UserError naming a row that is not valid, or if no row is left.
    """
    path = config.data.path if held_out is None else held_out.path
    beyond = unembedded(tokenizer, config.model)
    samples = []
    dropped = 0
    remarks = Remarks(path)
    for row in transcript_rows(config, tokenizer, held_out):
        remarks.add(row)
        require_embedded(row.token_ids, beyond, f"row {row.index} of {path}", config.model)
        if row.dropped:
            dropped += 1
        else:
            samples.append(_transcript(row))
    if not samples:
        limit = config.data.max_prompt_tokens + config.sft.max_tokens
        raise UserError(
            f"every row of {path} has over {limit} tokens or no assistant turn: raise sft.max_tokens"
        )
    return Transcripts(samples, dropped, remarks.lines())


def transcript_rows(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutConfig | None = None
) -> Iterator[RenderedRow]:
    """Yield each row of the training data, or of `held_out`, as a warm start sees it, in the file's
    order.

    Rows that are too long or have no assistant turn are among them, as dropped; those without one
    have no `token_ids`. The prompts describe the recipe's tools, as those of a run do. Raises
    UserError that names the file, and the row, if data cannot be read or a row cannot be used.
    """
    level = RolloutLevel(config, tokenizer)
    data = level.data
    rules = level.image_rules
    if held_out is not None:
        keys = held_out.model_dump(include={"prompt_key", "image_key"}, exclude_none=True)
        data = data.model_copy(update=held_out.model_dump(include={"path", "subset", "split"}) | keys)
    size = None if held_out is None else held_out.size
    rows = load_rows(
        data.path, data.subset, data.split, size, exact=[*columns_read(data), config.sft.completion_key]
    )
    check_preferences(rows, data.path, config.sft.completion_key)
    ends = end_tokens(config.model.path, tokenizer, data, config.sampling.stop_token_ids).ids
    if rules is None:
        teacher = Teacher(row_reader(data, tokenizer, rows), config.sft.completion_key, ends)
        rendered = _rows_without_images(rows, teacher, tokenizer)
    else:
        rows = encoded_images(rows)
        teacher = Teacher(
            row_reader(data, tokenizer, rows, rules.processor), config.sft.completion_key, ends
        )
        rendered = _rows_with_images(rows, teacher, rules)
    for row in rendered:
        dropped = ""
        if not any(row.learned[1:]):
            dropped = "has no assistant turn"
        elif len(row.token_ids) > data.max_prompt_tokens + config.sft.max_tokens:
            dropped = "is longer than data.max_prompt_tokens and sft.max_tokens together"
        yield replace(row, dropped=dropped)


@dataclass(frozen=True)
class Teacher:
    """Reads what a warm start learns from a row. Its methods raise ValueError as those of
    `RowReader`.

    `ends` are the ids that end an answer.
    """

    reader: RowReader
    completion_key: str
    ends: list[int]

    def messages(self, row: dict[str, Any]) -> tuple[list[CleanMessage], int]:
        """Return a row's conversation, and the index of the first message that may be learned.

        Of a conversation every assistant turn is learned; of a prompt with a completion, only the
        completion. Where the conversation ends with the assistant's turn already, it is complete,
        and the column of completions is not read.
        """
        prompt = self.reader.prompt(row)
        messages = self.reader.messages(row)
        ends = messages[-1]["role"] == "assistant"
        in_prompt = bool(self.reader.column(row, self.reader.config.prompt_key))
        completion = self.completion(row)
        if completion is None or (ends and not in_prompt):
            if isinstance(prompt, str):
                raise ValueError(
                    f"has a prompt, but no completion in {self.completion_key!r} (sft.completion_key)"
                )
            return messages, 0
        if ends:
            remedy = (
                f"name its column in data.messages_key, or drop that turn or {self.completion_key!r}"
            )
            raise ValueError(
                f"ends its prompt with an assistant's turn, and has a completion besides: {remedy}"
            )
        return messages + completion, len(messages) if in_prompt else 0

    def completion(self, row: dict[str, Any]) -> list[CleanMessage] | None:
        """Return a row's completion as clean messages; None if it has none."""
        value = messages_in(self.reader.column(row, self.completion_key))
        if value is None:
            return None
        if isinstance(value, Mapping) and "role" in value:
            value = [value]
        if isinstance(value, list):
            if self.reader.form is None:
                raise ValueError("holds a completion in messages, which need a chat template")
            return clean_messages(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = type(value).__name__
            raise ValueError(f"has a completion that is {kind}: it must be text, or a list of messages")
        return [{"role": "assistant", "content": str(value)}]

    def pieces(self, row: dict[str, Any], messages: list[CleanMessage], first: int) -> Pieces:
        """Split a row's text into pieces of context and of the assistant in turn, beginning with
        context.

        `messages` are those of `messages`, with placeholders of images. The template is rendered
        without and with each assistant turn: the difference is the turn with its markers.
        """
        tools = self.reader.tools(row)
        pieces: Pieces = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first:
                continue
            for end, learned in ((index, False), (index + 1, True)):
                text = self.reader.render(messages[:end], tools, add_generation_prompt=not learned)
                if not text.startswith(done):
                    raise ValueError(
                        f"cannot be used: the chat template changes the text before message {end}"
                    )
                pieces.append((text[len(done) :], learned))
                done = text
        return pieces

    def plain_pieces(self, row: dict[str, Any]) -> Pieces:
        """Return prompt and completion of a row without a chat template."""
        prompt = self.reader.prompt(row)
        completion = self.completion(row)
        if completion is None:
            raise ValueError(
                f"has a prompt, but no completion in {self.completion_key!r} (sft.completion_key)"
            )
        return [(prompt, False), (completion[0]["content"], True)]


def _rows_without_images(
    rows: "Dataset", teacher: Teacher, tokenizer: PreTrainedTokenizerBase
) -> Iterator[RenderedRow]:
    """Yield rows that have no images, tokenised a chunk at a time."""
    reader = teacher.reader

    def read(row: dict[str, Any]) -> tuple[RenderedRow, Pieces]:
        if reader.form is None:
            pieces = teacher.plain_pieces(row)
            return _rendered(row, None, [], pieces, reader), pieces
        messages, first = teacher.messages(row)
        pieces = teacher.pieces(row, messages, first)
        return _rendered(row, messages, reader.tools(row), pieces, reader), pieces

    for chunk in in_chunks(rows, reader.config.path, read):
        samples = encode(
            [pieces for _, _, (_, pieces) in chunk], tokenizer, reader.form is not None, teacher.ends
        )
        for index, _, (rendered, pieces) in chunk:
            sample = next(samples) if pieces else None
            yield _with_sample(replace(rendered, index=index), sample)


def _rendered(
    row: dict[str, Any],
    messages: list[CleanMessage] | None,
    tools: list[CleanMessage],
    pieces: Pieces,
    reader: RowReader,
) -> RenderedRow:
    text = "".join(text for text, _ in pieces)
    remarks = () if messages is None else reader.remarks(row, messages)
    return RenderedRow(0, row, messages, tools, text, (), remarks=remarks, reader=reader)


def _with_sample(rendered: RenderedRow, sample: Transcript | None) -> RenderedRow:
    if sample is None:
        return rendered
    return replace(
        rendered,
        token_ids=tuple(sample.input_ids),
        learned=tuple(sample.loss_mask),
        images=sample.stored,
        image_spans=sample.image_spans,
    )


def _transcript(row: RenderedRow) -> Transcript:
    ids = list(row.token_ids)
    return Transcript(
        ids, list(row.learned), [0.0] * len(ids), image_spans=row.image_spans, stored=row.images
    )


def _rows_with_images(rows: "Dataset", teacher: Teacher, rules: ImageRules) -> Iterator[RenderedRow]:
    """Yield rows that may have images; each image is decoded once here, and not kept."""
    reader = teacher.reader
    data = reader.config

    def sources(row: dict[str, Any]) -> list[Any]:
        """Return the images up to the last assistant turn; nothing is learned from later ones."""
        if reader.form is None:
            return row_images(row, data, data.path)
        messages, images = messages_and_images(teacher.messages(row)[0], row, data, data.path)
        last = max(
            (index for index, message in enumerate(messages) if message["role"] == "assistant"),
            default=-1,
        )
        contents = [message.get("content") for message in messages[: last + 1]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return images[: sum(part["type"] == "image" for part in parts)]

    def read(row: dict[str, Any]) -> tuple[RenderedRow, Transcript | None, tuple[Image, ...]]:
        if reader.form is None:
            pieces = teacher.plain_pieces(row)
            rendered = _rendered(row, None, [], pieces, reader)
        else:
            messages, first = teacher.messages(row)
            messages, _ = messages_and_images(messages, row, data, data.path)
            pieces = teacher.pieces(row, messages, first)
            rendered = _rendered(row, messages, reader.tools(row), pieces, reader)
        if not pieces:
            return rendered, None, ()
        images = rules.read(sources(row))
        sample = _encode_with_images(
            pieces, images, rules.processor, reader.form is not None, teacher.ends
        )
        return rendered, sample, images

    for chunk in in_chunks(rows, data.path, read):
        for index, _, (rendered, sample, images) in chunk:
            if sample is not None:
                stored = stored_images(rows, index, data.path, sources, images, rules)
                sample.stored = stored[: len(sample.image_spans)]
            yield _with_sample(replace(rendered, index=index), sample)


def _encode_with_images(
    pieces: Pieces,
    images: tuple[Image, ...],
    processor: ImageProcessor,
    templated: bool,
    ends: list[int],
) -> Transcript:
    """Tokenise one row with images, as `encode` does without. Images within an assistant turn are
    context, too.
    """
    if (count := sum(text.count(processor.image_token) for text, _ in pieces)) != len(images):
        mark = processor.image_token
        raise ValueError(
            f"has {len(images)} images, but {count} placeholders ({mark}) for them in its text"
        )
    encoded = []
    spans = list[tuple[int, int]]()
    begin = 0
    rest = images
    for number, (text, _) in enumerate(pieces):
        count = text.count(processor.image_token)
        first = rest[:count]
        rest = rest[count:]
        ids, places = processor.expand(text, first, special=number == 0 and not templated)
        spans += [(begin + start, length) for start, length in places]
        encoded.append(ids)
        begin += len(ids)
    sample = _masked(encoded, [learned for _, learned in pieces], ends, processor.tokenizer.eos_token_id)
    sample.image_spans = tuple(span for span in spans if sum(span) <= len(sample.input_ids))
    for start, length in sample.image_spans:
        sample.loss_mask[start : start + length] = [0] * length
    return sample


def encode(
    transcripts: list[Pieces], tokenizer: PreTrainedTokenizerBase, templated: bool, ends: list[int]
) -> Iterator[Transcript]:
    """Tokenise piece by piece, so that prompts have the same ids as in a rollout; the mask is by
    position.

    The mask is 1 on the tokens of an assistant's piece up to the first of `ends`, the ids that end
    an answer, which the assistant would sample; a newline that the template adds after it is
    context. Tokens after the last masked one are cut off, since nothing depends on them.
    """
    eos = tokenizer.eos_token_id
    transcripts = [pieces for pieces in transcripts if pieces]
    # A template writes its own special tokens; plain text still needs the tokenizer's, before the
    # prompt.
    beginnings = [pieces[0][0] for pieces in transcripts]
    firsts = iter(_ids(beginnings, tokenizer) if templated else plain_ids(tokenizer, beginnings))
    later = iter(_ids([text for pieces in transcripts for text, _ in pieces[1:]], tokenizer))
    for pieces in transcripts:
        encoded = [next(firsts), *(next(later) for _ in pieces[1:])]
        yield _masked(encoded, [learned for _, learned in pieces], ends, eos)


def _masked(pieces: list[list[int]], learned: list[bool], ends: list[int], eos: int) -> Transcript:
    """Join tokenised pieces to one sample with the mask that `encode` describes."""
    input_ids = list[int]()
    mask = list[int]()
    for piece, by_assistant in zip(pieces, learned, strict=True):
        sampled = 0
        if by_assistant:
            sampled = next((index + 1 for index, token in enumerate(piece) if token in ends), len(piece))
        input_ids += piece
        mask += [1] * sampled + [0] * (len(piece) - sampled)
    end = len(mask) - mask[::-1].index(1) if 1 in mask else len(mask)
    if input_ids[end - 1] not in ends:  # a template without one; the model must still learn to stop
        input_ids = [*input_ids[:end], eos]
        mask = [*mask[:end], 1]
        end = end + 1
    return Transcript(input_ids[:end], mask[:end], [0.0] * end)


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
