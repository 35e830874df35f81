"""Images of rows: where a row has them, and handles that read them again where they are needed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generation.images import Image, ImageLimits, ImageProcessor, ImageRules, StoredImage, split_images
from trainer.config.schema import DataConfig, TrainConfig
from trainer.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


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
        raise UserError(f"data.max_images: {config.model.path} has no processor for images: {reason}") from error
    limits = ImageLimits(data.max_image_pixels, data.larger_images)
    rollout = config.rollout
    return ImageRules(processor, limits, data.max_images, rollout.max_image_mib << 20, rollout.fetch_images)


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
    """Return the sources of the images in a row's image column, in order; `path` is the data's path."""
    column = row.get(config.image_key) if config.image_key is not None else None
    sources = column if isinstance(column, list) else [column]
    return [_located(source, path) for source in sources if source is not None]


def messages_and_images(
    messages: list[dict[str, Any]], row: dict[str, Any], config: DataConfig, path: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Split a row's messages into messages without images and the images' sources.

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
    """Return handles of a row's images that read them again, from the row's `sources`; `path` is the data's path."""

    def source(number: int) -> Any:
        return sources(dict(rows[index]))[number]

    names = (f"image {number + 1} of row {index} of {path}" for number in range(len(images)))
    return tuple(
        StoredImage(partial(source, number), image.digest, image.size, rules.limits, name)
        for number, (image, name) in enumerate(zip(images, names, strict=True))
    )


def _located(source: Any, path: str) -> Any:
    """Resolve an image's path relative to the folder of the data at `path`; return other sources unchanged."""
    if isinstance(source, dict) and not source.get("bytes"):
        source = source.get("path")
    remote = isinstance(source, str) and (source.startswith("data:") or "://" in source)
    if not isinstance(source, str) or remote:
        return source
    return (Path(path) if Path(path).is_dir() else Path(path).parent) / source
