"""Read a row's prompt, as text or messages, its tools and its answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from generation.image_marks import split_images, with_image_parts
from generation.images import ImageProcessor, Spans, StoredImage
from generation.messages import (
    ChatForm,
    CleanMessage,
    chat_form,
    chosen_tools,
    clean_messages,
    messages_in,
)
from trainer.config.schema import DataConfig
from trainer.data.row_images import check_images_are_read, image_remarks
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "the tokenizer has none, or data.apply_chat_template is false"
_CHUNK = 1000  # rows tokenised in one call, which the tokenizer spreads over its threads

T = TypeVar("T")


@dataclass(frozen=True)
class RenderedRow:
    """One row of the data as the model sees it; `trainer.data.prompt_rows` yields those of prompts,
    and `trainer.sft_rows.transcript_rows` those of a warm start.

    Attributes: index: the row's index in the dataset; dropped rows count. row: the row's columns as
        they are in the file, without its images; with `answer`, the column that data.answer_key
        names. messages: the messages that the chat template has rendered, cleaned, with the system
        prompt, each of their images as `{"type": "image"}`; None where the row is plain text.
        tools: the schemas of tools that the chat template has got; empty if there are none. text:
        the text that was tokenised, with the template's special tokens written out and one
        placeholder for each image. token_ids: the ids of `text`, with as many tokens for each image
        as it has features. images, image_spans: handles of the row's images, and the places of
        their tokens. learned: for a warm start 1 for each of `token_ids` that is trained and 0 for
        the others; empty for a prompt. dropped: why the row is left out, such as "is longer than
        data.max_prompt_tokens"; empty if it is used. remarks: sentences, without their subject, on
        what is suspicious in the row, though it can be used, such as "holds the special token
        '<|im_end|>' in its text". The same thing is said in the same words in each row. reader: the
        reader of all rows of the dataset.
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
    reader: "RowReader | None" = None


def in_chunks(
    rows: "Dataset", path: str, read: Callable[[dict[str, Any]], T]
) -> Iterator[list[tuple[int, dict[str, Any], T]]]:
    """Yield all rows in chunks for the tokenizer, as triples of index, row and `read(row)`.

    `read` may raise a ValueError with a sentence about the row without its subject; it becomes a
    UserError that names the row.
    """
    for start in range(0, len(rows), _CHUNK):
        chunk = []
        index = start
        try:
            for row in map(dict, rows.select(range(start, min(start + _CHUNK, len(rows))))):
                chunk.append((index, row, read(row)))
                index += 1
        except UnicodeDecodeError as error:  # Arrow does not look into texts before they are read
            byte = error.object[error.start]
            raise UserError(
                f"row {index} of {path} has a text that is not UTF-8: its byte {byte:#x}"
            ) from error
        except ValueError as error:
            raise UserError(f"row {index} of {path} {error}") from error
        yield chunk


@dataclass
class Remarks:
    """The remarks on the rows of the data at `path`, each with its first row and the number of its
    rows.
    """

    path: str
    rows: dict[str, list[int]] = field(default_factory=dict)

    def add(self, row: RenderedRow) -> None:
        """Note the remarks on a row."""
        for remark in row.remarks:
            first, count = self.rows.get(remark, (row.index, 0))
            self.rows[remark] = [first, count + 1]

    def lines(self) -> list[str]:
        """Return a sentence for each remark."""
        lines = []
        for remark, (first, count) in self.rows.items():
            lines.append(f"row {first} of {self.path} {remark} ({count} such rows)")
        return lines


@dataclass(frozen=True)
class RowReader:
    """Reads what the rows of one dataset say to the model. Its methods raise ValueError with a
    sentence about the row that lacks its subject.

    Attributes: config: the recipe's section, with the keys of this dataset. form: the chat
        template; None where rows are plain text. features: the types of the columns as `datasets`
        has them, which tell Arrow's nulls from those of a row. special_tokens: the tokens that
        texts of rows should not contain. bos_token: the one of them that begins a text.
    """

    config: DataConfig
    form: ChatForm | None
    features: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()
    bos_token: str | None = None

    @property
    def recipe_tools(self) -> list[CleanMessage]:
        """The schemas of the recipe's tools, as `RolloutLevel` has described them."""
        return self.config.chat_template_kwargs.get("tools") or []

    def column(self, row: Mapping[str, Any], name: str | None) -> Any:
        """Return a column's value without the nulls that Arrow has put under keys that only other
        rows have.
        """
        if name is None or row.get(name) is None:
            return None
        return _without_fill(row[name], self.features.get(name))

    def prompt(self, row: Mapping[str, Any]) -> Any:
        """Return a row's prompt as it was written: text or, only with a chat template, messages."""
        config = self.config
        content = self.column(row, config.prompt_key) or self.column(row, config.messages_key)
        if not content:
            raise ValueError(f"has neither {config.prompt_key!r} nor {config.messages_key!r}")
        content = messages_in(content)
        if self.form is None and not isinstance(content, str):
            raise ValueError(f"holds messages, which need a chat template: {NO_TEMPLATE}")
        if self.form is None:
            check_images_are_read(row, content, config)
        return content

    def messages(self, row: Mapping[str, Any], images: int = 0) -> list[CleanMessage]:
        """Return a row's prompt as clean messages, with the system prompt.

        A prompt that is plain text gets placeholders for this many `images` at its beginning.
        """
        content = self.prompt(row)
        plain = isinstance(content, str)
        messages = [{"role": "user", "content": content}] if plain else clean_messages(content)
        check_images_are_read(row, messages, self.config)
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return (
            split_images(with_image_parts(messages), [...] * images)[0] if images and plain else messages
        )

    def tools(self, row: Mapping[str, Any]) -> list[CleanMessage]:
        """Return the schemas of the tools that a row's prompt describes."""
        return chosen_tools(self.column(row, self.config.tools_key), self.recipe_tools)

    def render(
        self, messages: Sequence[CleanMessage], tools: Sequence[CleanMessage], **settings: Any
    ) -> str:
        """Return the chat template's text of clean messages; by default with the opening of an
        answer.
        """
        assert self.form is not None
        arguments = {**self.config.chat_template_kwargs, **settings}
        if tools:
            arguments["tools"] = list(tools)
        else:
            arguments.pop("tools", None)
        text = self.form.render(messages, **arguments)
        if not self.recipe_tools:
            for schema in tools:
                if schema["function"]["name"] not in text:
                    raise ValueError(
                        "has tools, which the chat template does not describe: set data.tools_key to "
                        "null"
                    )
        return text

    def render_prompt(self, messages: Sequence[CleanMessage], tools: Sequence[CleanMessage]) -> str:
        """Return the text of a prompt, which ends with the opening of an answer, or with the answer
        to be continued.
        """
        roles = {message["role"] for message in messages}
        if roles <= {"system", "developer"}:
            raise ValueError("holds a system message alone: it needs one of the user")
        if messages[-1]["role"] != "assistant":
            return self.render(messages, tools)
        kwargs = self.config.chat_template_kwargs
        if not self.config.continue_final and not kwargs.get("continue_final_message"):
            remedies = "drop that turn, or have it continued (data.continue_final: true)"
            raise ValueError(
                "ends with an assistant's turn, after which the model would answer once more: "
                f"{remedies}"
            )
        if messages[-1].get("tool_calls"):
            raise ValueError(
                "ends with a tool call, which cannot be continued: add the tool's reply, or drop the "
                "call"
            )
        return self.render(messages, tools, add_generation_prompt=False, continue_final_message=True)

    def remarks(self, row: Mapping[str, Any], messages: Sequence[CleanMessage]) -> tuple[str, ...]:
        """Return what is suspicious in a row. Raises ValueError for a text that is templated
        already.
        """
        remarks = [*image_remarks(row, self.config)]
        assert self.form is not None
        opening = self.form.opening.strip()
        for message in messages:
            content = message.get("content")
            if message["role"] == "assistant" or not isinstance(content, str):
                continue
            special = next((token for token in self.special_tokens if token in content), None)
            if special is None:
                continue
            begins = self.bos_token is not None and content.startswith(self.bos_token)
            if begins or (opening and content.rstrip().endswith(opening)):
                remedy = "set data.apply_chat_template to false, or leave its special tokens out"
                raise ValueError(f"has a text that is templated already ({special}): {remedy}")
            remarks.append(f"has the special token {special} in its text")
        return tuple(remarks)


def row_reader(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    rows: "Dataset | None" = None,
    processor: ImageProcessor | None = None,
) -> RowReader:
    """Return the reader of `rows`; without them, of rows whose nulls are their own. Raises
    UserError.
    """
    form = None
    if config.apply_chat_template and tokenizer.chat_template is not None:
        form = chat_form(tokenizer) if processor is None else processor.form
    elif config.system_prompt is not None:
        raise UserError(f"data.system_prompt needs a chat template: {NO_TEMPLATE}")
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = [token for token in added if "reserved" not in token and "unused" not in token]
    features = {} if rows is None else dict(rows.features)
    return RowReader(config, form, features, tuple(tokens), tokenizer.bos_token)


def _without_fill(value: Any, feature: Any) -> Any:
    """Return a value without the nulls that Arrow has put into its objects.

    A column of objects has the keys of all of them, and null for those that one lacks. Columns of
    type `Json`, which `datasets` gives to objects of a jsonl file with different keys, hold what
    the file holds.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        entries = ((key, entry) for key, entry in value.items() if entry is not None)
        return {key: _without_fill(entry, feature.get(key)) for key, entry in entries}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and inner is not None:
        return [_without_fill(entry, inner) for entry in value]
    return value


def column_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a field such as `reward_model.ground_truth`; None if the
    row lacks it.
    """
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
