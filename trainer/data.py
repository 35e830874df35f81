"""Loads rows and tokenises prompts, whose order in training is a pure function of seed, epoch and index."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from generation.images import Image, ImageLimits, ImageProcessor, ImageRules, Spans, StoredImage, split_images
from sharding.ranks import exchange, is_main
from trainer.config.machine import unwritable
from trainer.config.model_file import out_of_reach
from trainer.config.schema import DataConfig, HeldOutConfig, ModelConfig, TrainConfig, VerifiersConfig
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_NO_TEMPLATE = "the tokenizer has none, or data.apply_chat_template is false"
_CHUNK = 1000  # rows tokenised in one call, which the tokenizer spreads over its threads

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt."""

    id: int  # row index in the dataset; dropped rows count
    token_ids: tuple[int, ...]  # with the chat template, if any, and its generation prompt
    row: dict[str, Any]  # the entire row without its images; `row["answer"]` is the column data.answer_key names
    images: tuple[StoredImage, ...] = ()
    image_spans: Spans = ()


class PromptDataset(list[Prompt]):
    """The prompts that are not too long, and the endless sequence in which training takes them."""

    def __init__(self, prompts: Sequence[Prompt], dropped: int = 0) -> None:
        super().__init__(prompts)
        self.dropped = dropped  # number of prompts that were too long
        digest = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            parts = [prompt.id, prompt.token_ids, prompt.row, *(image.digest for image in prompt.images)]
            line = json.dumps(parts, sort_keys=True, default=repr)
            digest.update(line.encode())
        self.fingerprint = digest.hexdigest()  # a position is only valid in data with an equal fingerprint

    def take(self, position: int, count: int, seed: int) -> list[Prompt]:
        """Returns the `count` prompts from `position` on in training's sequence; see the function `take`."""
        return take(self, position, count, seed)


def take(items: Sequence[T], position: int, count: int, seed: int) -> list[T]:
    """Returns `count` items from `position` on in an endless sequence, in which each epoch is a permutation of `items`.

    There is no state between calls, so a run that resumes needs only its position. A batch may span epochs.
    """
    places = (divmod(place, len(items)) for place in range(position, position + count))
    return [items[epoch_order(seed, epoch, len(items))[index]] for epoch, index in places]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, length: int) -> tuple[int, ...]:
    """Returns a permutation of range(length) that depends on the arguments only, not even on NumPy's version.

    It uses the raw output of Philox, which NumPy promises never to change, unlike the result of `permutation`.
    """
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(length)
    return tuple(np.argsort(draws, kind="stable").tolist())


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Loads the model's tokenizer, or the one that model.tokenizer names. Raises UserError naming the path."""
    from transformers import AutoTokenizer

    path = model.tokenizer or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # Transformers reads the user's files as they come
        raise UserError(f"no tokenizer can be loaded from {path}: {_one_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless, since masks depend on positions, not on ids
    return tokenizer


def image_rules(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> ImageRules | None:
    """Returns the rules by which a run reads images, or None if it uses no images.

    Raises UserError if the model has no processor for images.
    """
    data = config.data
    if not data.max_images:
        return None
    try:
        processor = ImageProcessor(config.model.path, tokenizer, config.model.trust_remote_code)
    except Exception as error:  # Transformers reads the user's files as they come
        reason = _one_line(error)
        raise UserError(f"data.max_images: {config.model.path} has no processor for images: {reason}") from error
    limits = ImageLimits(data.max_image_pixels, data.larger_images)
    rollout = config.rollout
    return ImageRules(processor, limits, data.max_images, rollout.max_image_mib << 20, rollout.fetch_images)


def load_prompts(
    config: DataConfig, tokenizer: "PreTrainedTokenizerBase", images: ImageRules | None = None
) -> PromptDataset:
    """Loads the prompts to train on. Prompts longer than data.max_prompt_tokens are dropped and counted.

    Raises UserError if the data cannot be read, lack a column, hold a row without a prompt, or leave no prompts.
    """
    return _prepare(load_rows(config.path, config.subset, config.split), config.path, config, tokenizer, images)


def load_held_out(
    dataset: HeldOutConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", images: ImageRules | None = None
) -> PromptDataset:
    """Loads the prompts of a dataset to evaluate on, with its columns renamed to those of the training data, `config`.

    Raises UserError as `load_prompts`.
    """
    rows = load_rows(dataset.path, dataset.subset, dataset.split, dataset.size)
    if dataset.prompt_key not in (None, config.prompt_key):  # rollouts look for prompts in that column
        if dataset.prompt_key not in rows.column_names:
            there = f"{dataset.path} has only the columns {', '.join(rows.column_names)}"
            raise UserError(f"prompt_key = {dataset.prompt_key!r} of eval.datasets is not a column: {there}")
        kept = [name for name in rows.column_names if name != config.prompt_key]
        rows = rows.select_columns(kept).rename_column(dataset.prompt_key, config.prompt_key)
    keys = dataset.model_dump(include={"answer_key", "image_key"}, exclude_none=True)
    return _prepare(rows, dataset.path, config.model_copy(update=keys), tokenizer, images)


def load_rows(path: str, subset: str | None, split: str, size: int | None = None) -> "Dataset":
    """Loads the first `size` rows (None: all) of a dataset. Raises UserError. Collective.

    `path` names a jsonl or parquet file, a folder of such files, a dataset on the hub, `reasoning_gym:…` or
    `verifiers:…`. For verifiers, `subset` holds the settings in JSON.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    source, cache = Path(path), Path(datasets.config.HF_DATASETS_CACHE)
    try:
        if path.startswith("reasoning_gym:"):
            from generation.rollouts.environments import reasoning_gym

            rows = datasets.Dataset.from_list(reasoning_gym.rows(path))
        elif path.startswith("verifiers:"):
            rows = datasets.Dataset.from_list(_tasks(json.loads(subset or "{}")))
        elif not source.is_file():
            cached = (cache / path.replace("/", "___")).is_dir()
            if not source.is_dir() and not cached and (reason := out_of_reach()):
                here = f"{path} is not a file or folder"
                raise UserError(f"{here}, and cannot be fetched from the Hugging Face hub ({reason})")
            rows = datasets.load_dataset(path, subset, split=split)
        elif kind := _FILE_KINDS.get(source.suffix):
            if kind == "json":  # pyarrow 26 may crash on a null: https://github.com/apache/arrow/issues/47409
                with source.open("rb") as lines:
                    null = next((number for number, line in enumerate(lines, 1) if line.strip() == b"null"), None)
                if null is not None:
                    raise UserError(f"{source}: line {null} is null, but should be a row: leave it out")
            rows = datasets.load_dataset(kind, data_files={split.partition("[")[0]: path}, split=split)
        else:
            raise UserError(f"{path} is neither jsonl nor parquet, judging by its name")
    except StopIteration as error:  # raised for an empty file
        raise UserError(f"{path} holds no rows") from error
    except (datasets.exceptions.DatasetsError, ImportError, OSError, ValueError, RecursionError) as error:
        if isinstance(error.__cause__ or error, OSError) and (obstacle := unwritable(cache)):
            remedy = "set HF_DATASETS_CACHE, or HF_HOME, to a folder that can be written to"
            raise UserError(f"{path}: its rows are prepared in {cache}, but {obstacle}: {remedy}") from error
        raise UserError(f"{path} (split {split}) cannot be read: {_one_line(error.__cause__ or error)}") from error
    if len(rows) == 0:
        raise UserError(f"{path} (split {split}) holds no rows")
    return rows if size is None else rows.select(range(min(size, len(rows))))


def _tasks(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Loads the tasks of `rollout.verifiers` on rank 0, for all ranks. Raises ValueError on all ranks. Collective."""
    from generation.rollouts.environments import verifiers

    message: dict[str, Any] = {}
    if is_main():
        try:
            message["rows"] = verifiers.rows(VerifiersConfig.model_validate(settings).model_dump())
        except ValueError as error:
            message["error"] = str(error)
    message = exchange(message)[0]
    if "error" in message:
        raise ValueError(message["error"])
    return list(message["rows"])


def _prepare(
    rows: "Dataset",
    path: str,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    images: ImageRules | None = None,
) -> PromptDataset:
    there = f"{path} has only the columns {', '.join(rows.column_names)}"
    if config.prompt_key not in rows.column_names and config.messages_key not in rows.column_names:
        keys = f"data.prompt_key = {config.prompt_key!r} nor data.messages_key = {config.messages_key!r}"
        raise UserError(f"neither {keys} is a column: {there}")
    if config.answer_key is not None and column_value(rows.features, config.answer_key) is None:
        key = f"data.answer_key = {config.answer_key!r}"
        raise UserError(f"{key} is not a column or a field of one: {there}; set it to null if rewards need no answer")
    if config.image_key is not None and config.image_key not in rows.column_names:
        raise UserError(f"data.image_key = {config.image_key!r} is not a column: {there}")
    everything = _tokenise(rows, path, config, tokenizer)
    if images is not None:
        everything = _with_images(encoded_images(rows), path, config, images)
    most = config.max_prompt_tokens
    prompts = [prompt for prompt in everything if len(prompt.token_ids) <= most]
    if not prompts:
        raise UserError(f"all {len(rows)} prompts of {path} are longer than data.max_prompt_tokens = {most}: raise it")
    return PromptDataset(prompts, dropped=len(rows) - len(prompts))


def column_value(row: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a column, or of a field such as `reward_model.ground_truth`; None if the row lacks it."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _tokenise(rows: "Dataset", path: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Prompt]:
    """Yields all rows' prompts, in the order of the rows, including those that are too long."""
    templated = config.apply_chat_template and tokenizer.chat_template is not None
    settings = {"add_generation_prompt": True, **config.chat_template_kwargs}
    if config.system_prompt is not None and not templated:
        raise UserError(f"data.system_prompt needs a chat template: {_NO_TEMPLATE}")

    def render(row: dict[str, Any]) -> str:
        if not templated:
            return str(prompt_content(row, config, templated))
        messages = prompt_messages(row, config)
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
        except Exception as error:  # a template is a program
            raise ValueError(f"does not suit the chat template: {_one_line(error)}") from error

    for chunk in in_chunks(rows, path, render):
        # A chat template writes special tokens itself; for plain text the tokenizer adds them.
        encoded = tokenizer([text for _, _, text in chunk], add_special_tokens=not templated)["input_ids"]
        for (index, row, _), token_ids in zip(chunk, encoded, strict=True):
            if config.answer_key is not None:
                row["answer"] = column_value(row, config.answer_key)
            yield Prompt(index, tuple(token_ids), row)


def encoded_images(rows: "Dataset") -> "Dataset":
    """Returns the rows with images left encoded in their columns."""
    import datasets

    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows


def _with_images(rows: "Dataset", path: str, config: DataConfig, rules: ImageRules) -> Iterator[Prompt]:
    """Yields the prompts of rows that may have images, as `_tokenise`. Decoded images are not kept."""
    templated = config.apply_chat_template and rules.processor.tokenizer.chat_template is not None

    def parts(row: dict[str, Any]) -> tuple[Any, list[Any]]:
        if not templated:
            return prompt_content(row, config, templated), row_images(row, config, path)
        return messages_and_images(prompt_messages(row, config), row, config, path)

    def read(row: dict[str, Any]) -> tuple[Any, tuple[Image, ...], list[int], Spans]:
        content, sources = parts(row)
        images = rules.read(sources)
        return content, images, *rules.processor.expand(content, images, **config.chat_template_kwargs)

    for chunk in in_chunks(rows, path, read):
        for index, row, (content, images, ids, spans) in chunk:
            stored = stored_images(rows, index, path, lambda row: parts(row)[1], images, rules)
            plain = {name: value for name, value in row.items() if name != config.image_key}
            if templated and not isinstance(prompt_content(row, config, templated), str):
                plain[config.prompt_key if row.get(config.prompt_key) else config.messages_key] = content
            if config.answer_key is not None:
                plain["answer"] = column_value(row, config.answer_key)
            yield Prompt(index, tuple(ids), plain, stored, spans)


def row_images(row: dict[str, Any], config: DataConfig, path: str) -> list[Any]:
    """Returns the sources of the images in a row's image column, in order; `path` is the data's path."""
    column = row.get(config.image_key) if config.image_key is not None else None
    sources = column if isinstance(column, list) else [column]
    return [_located(source, path) for source in sources if source is not None]


def messages_and_images(
    messages: list[dict[str, Any]], row: dict[str, Any], config: DataConfig, path: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Splits a row's messages into messages without images and the images' sources.

    Raises ValueError as `split_images`.
    """
    plain, sources = split_images(messages, row_images(row, config, path))
    return plain, [_located(source, path) for source in sources]


def stored_images(
    rows: "Dataset",
    index: int,
    path: str,
    sources: Callable[[dict[str, Any]], list[Any]],
    images: Sequence[Image],
    rules: ImageRules,
) -> tuple[StoredImage, ...]:
    """Returns handles of a row's images that read them again, from the row's `sources`; `path` is the data's path."""

    def source(number: int) -> Any:
        return sources(dict(rows[index]))[number]

    names = (f"image {number + 1} of row {index} of {path}" for number in range(len(images)))
    return tuple(
        StoredImage(partial(source, number), image.digest, image.size, rules.limits, name)
        for number, (image, name) in enumerate(zip(images, names, strict=True))
    )


def _located(source: Any, path: str) -> Any:
    """Resolves an image's path relative to the folder of the data at `path`; returns other sources unchanged."""
    if isinstance(source, dict) and not source.get("bytes"):
        source = source.get("path")
    remote = isinstance(source, str) and (source.startswith("data:") or "://" in source)
    if not isinstance(source, str) or remote:
        return source
    return (Path(path) if Path(path).is_dir() else Path(path).parent) / source


def in_chunks(
    rows: "Dataset", path: str, read: Callable[[dict[str, Any]], T]
) -> Iterator[list[tuple[int, dict[str, Any], T]]]:
    """Yields all rows in chunks for the tokenizer, as triples of index, row and `read(row)`.

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
    """Returns a row's prompt: text or, only if `templated`, messages. Raises ValueError saying what the row lacks."""
    content = row.get(config.prompt_key) or row.get(config.messages_key)
    if not content:
        raise ValueError(f"has neither {config.prompt_key!r} nor {config.messages_key!r}")
    if not templated and not isinstance(content, str):
        raise ValueError(f"holds messages, which need a chat template: {_NO_TEMPLATE}")
    return content


def prompt_messages(row: dict[str, Any], config: DataConfig, images: int = 0) -> list[dict[str, Any]]:
    """Returns a row's prompt as messages, with the system prompt. Raises ValueError saying what the row lacks.

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


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]
