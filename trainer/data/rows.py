"""What a row says: its prompt as text or messages, its tools, and its answer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from generation.images import Spans, StoredImage, split_images
from trainer.config.schema import DataConfig
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

NO_TEMPLATE = "the tokenizer has none, or data.apply_chat_template is false"
_CHUNK = 1000  # rows tokenised in one call, which the tokenizer spreads over its threads

T = TypeVar("T")


@dataclass(frozen=True)
class RenderedRow:
    """One row of the data as the model sees it; `trainer.data.prompt_rows` yields those of prompts, and
    `trainer.commands.sft.transcript_rows` those of a warm start.

    Attributes:
        index: the row's index in the dataset; dropped rows count.
        row: the row's columns as they are in the file, without its images; with `answer`, the column that
            data.answer_key names.
        messages: the messages that the chat template has rendered, cleaned, with the system prompt, each of their
            images as `{"type": "image"}`; None where the row is plain text.
        tools: the schemas of tools that the chat template has got; empty if there are none.
        text: the text that was tokenised, with the template's special tokens written out and one placeholder for each
            image.
        token_ids: the ids of `text`, with as many tokens for each image as it has features.
        images, image_spans: handles of the row's images, and the places of their tokens.
        learned: for a warm start 1 for each of `token_ids` that is trained and 0 for the others; empty for a prompt.
        dropped: why the row is left out, such as "is longer than data.max_prompt_tokens"; empty if it is used.
        remarks: sentences, without their subject, on what is suspicious in the row, though it can be used, such as
            "holds the special token '<|im_end|>' in its text". The same thing is said in the same words in each row.
    """

    index: int
    row: dict[str, Any]
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    text: str
    token_ids: tuple[int, ...]
    images: tuple[StoredImage, ...] = ()
    image_spans: Spans = ()
    learned: tuple[int, ...] = ()
    dropped: str = ""
    remarks: tuple[str, ...] = ()


def in_chunks(
    rows: "Dataset", path: str, read: Callable[[dict[str, Any]], T]
) -> Iterator[list[tuple[int, dict[str, Any], T]]]:
    """Yield all rows in chunks for the tokenizer, as triples of index, row and `read(row)`.

    `read` may raise a ValueError with a sentence about the row without its subject; it becomes a UserError that names
    the row.
    """
    for start in range(0, len(rows), _CHUNK):
        chunk = []
        for index, row in enumerate(map(dict, rows.select(range(start, min(start + _CHUNK, len(rows))))), start):
            try:
                chunk.append((index, row, read(row)))
            except ValueError as error:
                raise UserError(f"row {index} of {path} {error}") from error
        yield chunk


def prompt_content(row: dict[str, Any], config: DataConfig, templated: bool) -> Any:
    """Return a row's prompt: text or, only if `templated`, messages. Raises ValueError saying what the row lacks."""
    content = row.get(config.prompt_key) or row.get(config.messages_key)
    if not content:
        raise ValueError(f"has neither {config.prompt_key!r} nor {config.messages_key!r}")
    if not templated and not isinstance(content, str):
        raise ValueError(f"holds messages, which need a chat template: {NO_TEMPLATE}")
    return content


def prompt_messages(row: dict[str, Any], config: DataConfig, images: int = 0) -> list[dict[str, Any]]:
    """Return a row's prompt as messages, with the system prompt. Raises ValueError saying what the row lacks.

    A prompt that is plain text gets placeholders for this many `images` at its beginning.
    """
    content = prompt_content(row, config, templated=True)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(messages, list) or not all(isinstance(part, dict) and part.get("role") for part in messages):
        raise ValueError("has a prompt that is neither a string nor a list of messages with role and content")
    # Arrow gives all messages the same keys; the value None stands for a key that the message did not have.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return split_images(messages, [...] * images)[0] if images and isinstance(content, str) else messages


def column_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field such as `reward_model.ground_truth`; None if the row lacks it."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
