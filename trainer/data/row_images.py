"""Images of rows: where a row has them, and handles that read them again where they are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation.image_marks import split_images, with_image_parts
from generation.images import Image, ImageLimits, ImageProcessor, ImageRules, StoredImage, base64_image
from trainer.config.schema import DataConfig, TrainConfig
from trainer.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def image_rules(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> ImageRules | None:
    """Return the rules by which a run reads images, or None if it uses no images.

    Raises UserError if the model has no processor for images.
    """
    data = config.data
    if not data.max_images:
        return None
    try:
        processor = ImageProcessor(config.model.path, tokenizer, config.model.trust_remote_code)
    except Exception as error:  # Transformers reads the user's files as they come
        reason = one_line(error)
        raise UserError(
            f"data.max_images: {config.model.path} has no processor for images: {reason}"
        ) from error
    limits = ImageLimits(data.max_image_pixels, data.larger_images)
    rollout = config.rollout
    return ImageRules(
        processor, limits, data.max_images, rollout.max_image_mib << 20, rollout.fetch_images
    )


def encoded_images(rows: "Dataset") -> "Dataset":
    """Return the rows with images left encoded in their columns."""
    import datasets

    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows


def row_images(row: dict[str, Any], config: DataConfig, path: str) -> list[Any]:
    """Return the sources of the images in a row's image column, in order; `path` is the data's
    path.

    Raises ValueError, whose message is a sentence without its subject, if one of several is null.
    """
    column = row.get(config.image_key) if config.image_key is not None else None
    if column is None:
        return []
    sources = column if isinstance(column, list) else [column]
    if None in sources:
        raise ValueError(
            f"has a null among its images, as image {sources.index(None) + 1}: leave it out"
        )
    return [_located(source, path) for source in sources]


def messages_and_images(
    messages: list[dict[str, Any]], row: dict[str, Any], config: DataConfig, path: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Split a row's messages into messages without images and the images' sources.

    Raises ValueError as `split_images`.
    """
    plain, sources = split_images(with_image_parts(messages), row_images(row, config, path))
    return plain, [_located(source, path) for source in sources]


def stored_images(
    rows: "Dataset",
    index: int,
    path: str,
    sources: Callable[[dict[str, Any]], list[Any]],
    images: Sequence[Image],
    rules: ImageRules,
) -> tuple[StoredImage, ...]:
    """Return handles of a row's images that read them again, from the row's `sources`; `path` is
    the data's path.
    """

    def source(number: int) -> Any:
        return sources(dict(rows[index]))[number]

    names = (f"image {number + 1} of row {index} of {path}" for number in range(len(images)))
    return tuple(
        StoredImage(partial(source, number), image.digest, image.size, rules.limits, name)
        for number, (image, name) in enumerate(zip(images, names, strict=True))
    )


def _located(source: Any, path: str) -> Any:
    """Resolve an image's path relative to the folder of the data at `path`; return other sources
    unchanged.
    """
    if isinstance(source, dict) and not source.get("bytes"):
        source = source.get("path")
    if not isinstance(source, str) or source.startswith(("data:", "file:")) or "://" in source:
        return source
    if base64_image(source) is not None:
        return source
    return (Path(path) if Path(path).is_dir() else Path(path).parent) / source


def check_images_are_read(row: Mapping[str, Any], prompt: Any, config: DataConfig) -> None:
    """Raise ValueError, whose message is a sentence without its subject, if the prompt needs images
    that are not read.

    `prompt` is the row's text or messages. A column with images that nothing mentions may be meant
    for something else: `image_remarks` names it.
    """
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts: list[Any] = []
    for content in contents:
        parts += content if isinstance(content, list) else [content]
    pictured = any(isinstance(part, Mapping) and _is_picture(part) for part in parts)
    if pictured and not config.max_images:
        raise ValueError(
            "has an image in its messages, but data.max_images is 0: set it to the most that a row has"
        )
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    marked = any("<image>" in text for text in texts if isinstance(text, str))
    column = next(_unread_columns(row, config), None)
    meant = marked or (config.max_images and not pictured)
    if column is not None and config.image_key is None and meant:
        remedy = f"set data.image_key to {column} and data.max_images to the most images of a row"
        raise ValueError(
            f"has images in its column {column!r}, which is not read: {remedy}, or drop the column"
        )


def image_remarks(row: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
    """Return a sentence, without its subject, for each column of images that is not read."""
    return tuple(
        f"has images in its column {name!r}, which is not read" for name in _unread_columns(row, config)
    )


def _unread_columns(row: Mapping[str, Any], config: DataConfig) -> Iterator[str]:
    read = (config.prompt_key, config.messages_key, config.answer_key, config.image_key, "answer")
    return (name for name, value in row.items() if name not in read and _holds_image(value))


def _is_picture(part: Mapping[str, Any]) -> bool:
    """Return True if a part of a message is an image or a video; Arrow gives all parts the same
    keys, some null.
    """
    kind = str(part.get("type"))
    return "image" in kind or "video" in kind or any(part.get(key) for key in ("image", "image_url"))


def _holds_image(value: Any) -> bool:
    """Return True if a column's value is an image, or a list of them, in a form that an image
    column may have.
    """
    if isinstance(value, list):
        return any(map(_holds_image, value))
    if isinstance(value, Mapping):  # as `datasets` stores images
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, str):
        path = value.lower().endswith(_SUFFIXES) and len(value.split()) == 1 and "://" not in value
        return path or value.startswith("data:image/") or base64_image(value) is not None
    return hasattr(value, "convert") and hasattr(value, "size")  # Pillow's
