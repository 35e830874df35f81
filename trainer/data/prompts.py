"""Tokenised prompts, whose order in training is a pure function of seed, epoch and index."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from generation.images import Image, ImageRules, Spans, StoredImage
from generation.messages import CleanMessage, plain_ids
from trainer.config.model_file import embedding_rows
from trainer.config.schema import DataConfig, HeldOutConfig, ModelConfig
from trainer.data.files import load_rows
from trainer.data.row_images import encoded_images, messages_and_images, row_images, stored_images
from trainer.data.rows import Remarks, RenderedRow, RowReader, column_value, in_chunks, row_reader
from trainer.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt."""

    id: int  # row index in the dataset; dropped rows count
    token_ids: tuple[int, ...]  # with the chat template, if any, and its generation prompt
    # The entire row without its images; `row["answer"]` is the column data.answer_key names
    row: dict[str, Any]
    images: tuple[StoredImage, ...] = ()
    image_spans: Spans = ()
    reader: RowReader | None = field(default=None, repr=False, compare=False)  # of its dataset's rows


class PromptDataset(list[Prompt]):
    """The prompts that are not too long, and the endless sequence in which training takes them."""

    def __init__(self, prompts: Sequence[Prompt], dropped: int = 0, remarks: Sequence[str] = ()) -> None:
        super().__init__(prompts)
        self.dropped = dropped  # number of prompts that were too long
        self.remarks = remarks  # sentences on what is suspicious in the rows
        digest = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            parts = [prompt.id, prompt.token_ids, prompt.row, *(image.digest for image in prompt.images)]
            line = json.dumps(parts, sort_keys=True, default=repr)
            digest.update(line.encode())
        # A position is only valid in data with an equal fingerprint
        self.fingerprint = digest.hexdigest()

    def take(self, position: int, count: int, seed: int) -> list[Prompt]:
        """Return the `count` prompts from `position` on in training's sequence; see the function
        `take`.
        """
        return take(self, position, count, seed)


def take(items: Sequence[T], position: int, count: int, seed: int) -> list[T]:
    """Return `count` items from `position` on in an endless sequence, in which each epoch is a
    permutation of `items`.

    There is no state between calls, so a run that resumes needs only its position. A batch may span
    epochs.
    """
    indices = (divmod(number, len(items)) for number in range(position, position + count))
    return [items[epoch_order(seed, epoch, len(items))[index]] for epoch, index in indices]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, length: int) -> tuple[int, ...]:
    """Return a permutation of range(length) that depends on the arguments only, not even on NumPy's
    version.

    It uses the raw output of Philox, which NumPy promises never to change, unlike the result of
    `permutation`.
    """
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(length)
    return tuple(np.argsort(draws, kind="stable").tolist())


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer, or the one that model.tokenizer names. Raises UserError naming
    the path.
    """
    from transformers import AutoTokenizer

    path = model.tokenizer or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # Transformers reads the user's files as they come
        raise UserError(f"no tokenizer can be loaded from {path}: {one_line(error)}") from error
    beyond = unembedded(tokenizer, model)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in beyond:
        # Harmless, since masks depend on positions, not on ids
        tokenizer.pad_token = tokenizer.eos_token
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    template = str(tokenizer.chat_template)
    for token_id, token in beyond.items():
        if token_id in ends or token in template:
            raise UserError(f"the tokenizer of {path} needs {_without_row(token, token_id, model)}")
    return tokenizer


def unembedded(tokenizer: "PreTrainedTokenizerBase", model: ModelConfig) -> dict[int, str]:
    """Return the tokens by id for which the model's embedding has no row; embeddings know nothing
    of their names.

    Some released models have such tokens, like Gemma 3's text-only ones that for images, so they
    matter only where they are used.
    """
    rows = embedding_rows(model.path)
    if rows is None:
        return {}
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= rows}


def check_token_ids(
    datasets: Mapping[str, Iterable[Prompt]], tokenizer: "PreTrainedTokenizerBase", model: ModelConfig
) -> None:
    """Raise UserError naming the first prompt of these datasets, by name, with a token that the
    model cannot embed.
    """
    beyond = unembedded(tokenizer, model)
    for name, prompts in datasets.items() if beyond else ():
        for prompt in prompts:
            require_embedded(prompt.token_ids, beyond, f"row {prompt.id} of {name}", model)


def require_embedded(
    token_ids: Sequence[int], beyond: Mapping[int, str], where: str, model: ModelConfig
) -> None:
    """Raise UserError if one of the ids is among those that `unembedded` found; `where` names the
    place of the text.
    """
    token_id = next((token_id for token_id in token_ids if token_id in beyond), None)
    if token_id is not None:
        raise UserError(f"{where} holds {_without_row(beyond[token_id], token_id, model)}")


def _without_row(token: str, token_id: int, model: ModelConfig) -> str:
    rows = embedding_rows(model.path)
    remedy = (
        "name the model's own in model.tokenizer, or save the model after resize_token_embeddings of "
        "Transformers"
    )
    return (
        f"{token!r} with the id {token_id}, but the embedding of {model.path} has {rows} rows: {remedy}"
    )


def load_prompts(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", images: ImageRules | None = None
) -> PromptDataset:
    """Load the prompts to train on. Prompts longer than data.max_prompt_tokens are dropped and
    counted.

    Raises UserError if the data cannot be read, lack a column, hold a row without a prompt, or
    leave no prompts.
    """
    return _usable(prompt_rows(config, tokenizer, images), config.path, config.max_prompt_tokens)


def load_held_out(
    dataset: HeldOutConfig,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    images: ImageRules | None = None,
) -> PromptDataset:
    """Load the prompts of a dataset to evaluate on, with its columns renamed to those of the
    training data, `config`.

    Raises UserError as `load_prompts`.
    """
    rows = prompt_rows(config, tokenizer, images, held_out=dataset)
    return _usable(rows, dataset.path, config.max_prompt_tokens)


def plain_prompts(
    rows: Sequence[Mapping[str, Any]], config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    """Return the prompts of rows in memory, which have no images, in their order. Raises UserError
    naming the row that cannot be used.
    """
    reader = row_reader(config, tokenizer)
    prompts = []
    for number, row in enumerate(rows):
        try:
            if reader.form is None:
                [ids] = plain_ids(tokenizer, [reader.prompt(row)])
            else:
                text = reader.render_prompt(reader.messages(row), reader.tools(row))
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except ValueError as error:
            raise UserError(f"row {number} {error}") from error
        prompts.append(Prompt(number, tuple(ids), dict(row), reader=reader))
    return prompts


def _usable(rendered: Iterable[RenderedRow], path: str, most: int) -> PromptDataset:
    """Return the prompts that are not dropped. Raises UserError if all are."""
    prompts = []
    dropped = 0
    remarks = Remarks(path)
    for row in rendered:
        remarks.add(row)
        if row.dropped:
            dropped += 1
        else:
            prompts.append(
                Prompt(row.index, row.token_ids, row.row, row.images, row.image_spans, row.reader)
            )
    if not prompts:
        raise UserError(
            f"all {dropped} prompts of {path} are longer than data.max_prompt_tokens = {most}: raise it"
        )
    return PromptDataset(prompts, dropped, remarks.lines())


def prompt_rows(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    images: ImageRules | None = None,
    *,
    held_out: HeldOutConfig | None = None,
) -> Iterator[RenderedRow]:
    """Yield each row of the training data, or of a dataset to evaluate on, as the model sees it, in
    the file's order.

    Rows that are too long are among them, as dropped. Nothing is kept between rows, so a caller may
    stop early. The tools of the recipe are in `config.chat_template_kwargs`, where
    `RolloutLevel.data` has put them.

    Raises UserError that names the file, and the row, if data cannot be read or a row cannot be
    used.
    """
    if held_out is None:
        rows = load_rows(config.path, config.subset, config.split, exact=columns_read(config))
    else:
        exact = [*columns_read(config), held_out.prompt_key or ""]
        rows = load_rows(held_out.path, held_out.subset, held_out.split, held_out.size, exact=exact)
        rows = _with_columns_of_training(rows, held_out, config)
        keys = held_out.model_dump(include={"path", "answer_key", "image_key"}, exclude_none=True)
        config = config.model_copy(update=keys)
    _check_columns(rows, config)
    rendered = (
        _rendered(rows, config, tokenizer) if images is None else _with_images(rows, config, images)
    )
    for row in rendered:
        if len(row.token_ids) > config.max_prompt_tokens:
            row = replace(row, dropped="is longer than data.max_prompt_tokens")
        yield row


def columns_read(config: DataConfig) -> list[str]:
    """Return the columns from which prompts are made, whether the data have them or not; rewards
    may read others.
    """
    keys = [
        config.prompt_key,
        config.messages_key,
        config.tools_key,
        config.answer_key,
        config.image_key,
    ]
    return [key for key in keys if key is not None]


def _with_columns_of_training(rows: "Dataset", dataset: HeldOutConfig, config: DataConfig) -> "Dataset":
    """Return the rows with the prompts in the column of the training data, where rollouts look for
    them.
    """
    if dataset.prompt_key in (None, config.prompt_key):
        return rows
    if dataset.prompt_key not in rows.column_names:
        there = f"{dataset.path} has only the columns {', '.join(rows.column_names)}"
        raise UserError(f"prompt_key = {dataset.prompt_key!r} of eval.datasets is not a column: {there}")
    others = [name for name in rows.column_names if name != config.prompt_key]
    return rows.select_columns(others).rename_column(dataset.prompt_key, config.prompt_key)


def _check_columns(rows: "Dataset", config: DataConfig) -> None:
    """Raise UserError if the rows lack a column that the recipe names."""
    check_preferences(rows, config.path, config.prompt_key, config.messages_key)
    there = f"{config.path} has only the columns {', '.join(rows.column_names)}"
    if config.prompt_key not in rows.column_names and config.messages_key not in rows.column_names:
        keys = f"data.prompt_key = {config.prompt_key!r} nor data.messages_key = {config.messages_key!r}"
        raise UserError(f"neither {keys} is a column: {there}")
    if config.answer_key is not None and not _has_column(rows.features, config.answer_key):
        key = f"data.answer_key = {config.answer_key!r}"
        raise UserError(
            f"{key} is not a column or a field of one: {there}; set it to null if rewards need no answer"
        )
    if config.image_key is not None and config.image_key not in rows.column_names:
        raise UserError(f"data.image_key = {config.image_key!r} is not a column: {there}")


def check_preferences(rows: "Dataset", path: str, *keys: str) -> None:
    """Raise UserError if the rows are pairs of answers, and have none of the columns that a run
    needs.
    """
    names = set(rows.column_names)
    if {"chosen", "rejected"} <= names and names.isdisjoint(keys):
        needed = " or ".join(map(repr, keys))
        remedy = "rename one of its columns, or name it in the recipe, if it is meant"
        raise UserError(
            f"{path} is a file of preferences (chosen, rejected), but has no column {needed}: {remedy}"
        )


def _has_column(features: Mapping[str, Any], key: str) -> bool:
    """Return True if a key names a column or a field of one. What is in a column of type `Json`,
    rows alone tell.
    """
    column = features.get(key.partition(".")[0])
    return column_value(features, key) is not None or type(column).__name__ == "Json"


def _rendered(
    rows: "Dataset", config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[RenderedRow]:
    """Yield rows without images, in the order of the rows, including those that are too long."""
    reader = row_reader(config, tokenizer, rows)

    def read(row: dict[str, Any]) -> RenderedRow:
        if reader.form is None:
            return RenderedRow(0, row, None, [], reader.prompt(row), ())
        messages = reader.messages(row)
        tools = reader.tools(row)
        text = reader.render_prompt(messages, tools)
        return RenderedRow(
            0, row, messages, tools, text, (), remarks=_remarks(reader, row, messages, tools)
        )

    for chunk in in_chunks(rows, config.path, read):
        texts = [rendered.text for _, _, rendered in chunk]
        # A chat template writes special tokens itself; for plain text the tokenizer adds them.
        if reader.form is None:
            encoded = plain_ids(tokenizer, texts)
        else:
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for (index, row, rendered), token_ids in zip(chunk, encoded, strict=True):
            if config.answer_key is not None:
                row["answer"] = column_value(row, config.answer_key)
            yield replace(rendered, index=index, token_ids=tuple(token_ids), reader=reader)


def _remarks(
    reader: RowReader, row: dict[str, Any], messages: list[CleanMessage], tools: list[CleanMessage]
) -> tuple[str, ...]:
    remarks = reader.remarks(row, messages)
    if tools and not reader.recipe_tools:
        remarks += ("describes tools that the recipe does not run, so no call of them is answered",)
    return remarks


def _with_images(rows: "Dataset", config: DataConfig, rules: ImageRules) -> Iterator[RenderedRow]:
    """Yield rows that may have images, as `_rendered`. Decoded images are not kept."""
    rows = encoded_images(rows)
    path = config.path
    reader = row_reader(config, rules.processor.tokenizer, rows, rules.processor)

    def parts(row: dict[str, Any]) -> tuple[Any, list[Any]]:
        if reader.form is None:
            return reader.prompt(row), row_images(row, config, path)
        return messages_and_images(reader.messages(row), row, config, path)

    def read(row: dict[str, Any]) -> tuple[RenderedRow, tuple[Image, ...]]:
        content, sources = parts(row)
        images = rules.read(sources)
        if reader.form is None:
            ids, spans = rules.processor.expand(content, images)
            return RenderedRow(0, row, None, [], content, tuple(ids), image_spans=spans), images
        tools = reader.tools(row)
        text = reader.render_prompt(content, tools)
        ids, spans = rules.processor.expand(text, images, special=False)
        remarks = _remarks(reader, row, content, tools)
        rendered = RenderedRow(
            0, row, content, tools, text, tuple(ids), image_spans=spans, remarks=remarks
        )
        return rendered, images

    for chunk in in_chunks(rows, path, read):
        for index, row, (rendered, images) in chunk:
            stored = stored_images(rows, index, path, lambda row: parts(row)[1], images, rules)
            plain = {name: value for name, value in row.items() if name != config.image_key}
            if rendered.messages is not None and not isinstance(reader.prompt(row), str):
                plain[config.prompt_key if row.get(config.prompt_key) else config.messages_key] = (
                    rendered.messages
                )
            if config.answer_key is not None:
                plain["answer"] = column_value(row, config.answer_key)
            yield replace(rendered, index=index, row=plain, images=stored, reader=reader)
