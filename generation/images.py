"""Images of prompts and answers, and the one place that says how many tokens each of them takes.

Nothing here imports Pillow, torch or Transformers before an image is read.
"""

import base64
import binascii
import functools
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    import PIL.Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow's others include some that start programs
_BOMB = 89_478_485  # pixels; Pillow's own limit (PIL.Image.MAX_IMAGE_PIXELS): a quarter of a GiB at 24 bits

Spans = tuple[tuple[int, int], ...]
"""(first index among the ids, length) of the tokens that each image's features take the place of, in their order."""


@dataclass(frozen=True)
class ImageLimits:
    """The largest image, in pixels, and what becomes of a larger one."""

    max_pixels: int = 1 << 22
    larger: Literal["refuse", "resize"] = "refuse"


@dataclass(frozen=True)
class Image:
    """An image as it was encoded. Two are equal where their digests are.

    Attributes:
        data: the file's bytes.
        digest: SHA-256 of `data`, in hexadecimal digits.
        size: width and height in pixels, the right way up.
    """

    data: bytes = field(repr=False, compare=False)
    digest: str
    size: tuple[int, int]

    @classmethod
    def read(cls, source: Any, limits: ImageLimits = ImageLimits()) -> Self:
        """An image from a path, its bytes, a data URL, a Pillow image, or the `bytes` and `path` of a dataset's column.

        It is decoded once. Raises ValueError, a sentence about the image without its subject: "is not an image …".
        """
        data = _encoded(source)
        image = _decoded(data, limits)
        if image.width * image.height > limits.max_pixels:
            if limits.larger == "refuse":
                size = f"{image.width} x {image.height} pixels"
                raise ValueError(f"has {size}, more than data.max_image_pixels = {limits.max_pixels}")
            image = _smaller(image, limits.max_pixels)
            data = _png(image)
        return cls(data, hashlib.sha256(data).hexdigest(), image.size)

    def open(self) -> "PIL.Image.Image":
        """The pixels: RGB, the right way up, on white where it is transparent."""
        return _decoded(self.data, ImageLimits(max_pixels=_BOMB))


def _encoded(source: Any) -> bytes:
    if isinstance(source, Mapping):  # as the `datasets` library stores images
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source.startswith("data:"):
        head, _, body = source.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise ValueError(f"is a data URL of the kind {head[:40]!r}, but must be data:image/…;base64")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise ValueError(f"is a data URL whose base64 is broken: {error}") from error
    if isinstance(source, str | Path):
        if "://" in str(source):
            raise ValueError(f"is a remote address ({str(source)[:60]}): give a file, bytes or a data URL")
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror or error}: {source}") from error
    if hasattr(source, "convert") and hasattr(source, "size"):  # Pillow's
        return _png(source)
    raise ValueError(f"is {type(source).__name__}, but must be a path, bytes, a data URL or a Pillow image")


def _decoded(data: bytes, limits: ImageLimits) -> "PIL.Image.Image":
    from PIL import Image as Pillow
    from PIL import ImageOps

    allowed = _BOMB if limits.larger == "resize" else min(limits.max_pixels, _BOMB)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # the next lines refuse more
            image: PIL.Image.Image = Pillow.open(io.BytesIO(data), formats=_FORMATS)
        pixels = image.width * image.height  # by its header: nothing has been decompressed
        if pixels > allowed:
            name = "data.max_image_pixels" if allowed < _BOMB else "any image may have"
            raise ValueError(f"has {image.width} x {image.height} pixels, more than {name} ({allowed})")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            ground = Pillow.new("RGBA", image.size, "white")
            image = Pillow.alpha_composite(ground, image)
        return image.convert("RGB")
    except Pillow.DecompressionBombError as error:
        raise ValueError(f"has more pixels than any image may have ({_BOMB})") from error
    except Pillow.UnidentifiedImageError as error:
        raise ValueError(f"is not an image of a known kind ({', '.join(_FORMATS)})") from error
    except (OSError, SyntaxError) as error:  # a broken PNG is a SyntaxError to Pillow
        raise ValueError(f"is broken: {error}") from error


def _smaller(image: "PIL.Image.Image", pixels: int) -> "PIL.Image.Image":
    factor = (pixels / (image.width * image.height)) ** 0.5
    return image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))


def _png(image: "PIL.Image.Image") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


class ImageProcessor:
    """A model's processor, as Transformers has it: from text and images to ids, and from images to features."""

    def __init__(
        self, folder: str, tokenizer: "PreTrainedTokenizerBase | None" = None, trust_remote_code: bool = False
    ) -> None:
        """The processor saved in `folder`. Raises ValueError where there is none for images."""
        from transformers import AutoProcessor

        named = {} if tokenizer is None else {"tokenizer": tokenizer}
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, **named)
        if getattr(processor, "image_processor", None) is None or not getattr(processor, "image_token", None):
            raise ValueError(f"{folder} holds no processor for images (preprocessor_config.json)")
        self._processor = processor
        self.tokenizer: PreTrainedTokenizerBase = processor.tokenizer
        self.image_token: str = processor.image_token  # as it stands in text before it is expanded, once an image
        self._replacement = functools.lru_cache(maxsize=4096)(self._replacement_of)

    def expand(
        self, prompt: str | Sequence[Mapping[str, Any]], images: Sequence[Image], **template: Any
    ) -> tuple[list[int], Spans]:
        """The ids of a prompt, text or messages, in which each image has as many tokens as it has features, and where.

        `template` goes to the chat template; a generation prompt is added by default. Raises ValueError, a sentence
        about the prompt without its subject, where it has not one placeholder for each image.
        """
        text = prompt if isinstance(prompt, str) else self.render(prompt, **template)
        if (found := text.count(self.image_token)) != len(images):
            raise ValueError(
                f"has {len(images)} images, but {found} placeholders ({self.image_token}) for them in its text"
            )
        if images:
            replacements = [self._replacement(image.size) for image in images]
            [text], _ = self._processor.get_text_with_replacements([text], replacements)
        ids = self.tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        return ids, self.spans(ids, images)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Messages, whose content may be a list of parts, as the chat template writes them; not expanded."""
        settings = {"add_generation_prompt": True, **template}
        return str(self._processor.apply_chat_template([*map(dict, messages)], tokenize=False, **settings))

    def spans(self, ids: Sequence[int], images: Sequence[Image]) -> Spans:
        """Where the images' tokens are in expanded ids that nothing was sampled of."""
        if not images:
            return ()
        [kinds] = self._processor.create_mm_token_type_ids([list(ids)])
        places = [index for index, kind in enumerate(kinds) if kind == 1]
        spans, begin = [], 0
        for image in images:
            count = self.tokens(image.size)
            run = places[begin : begin + count]
            if len(run) < count or run[-1] - run[0] != count - 1:
                raise ValueError(f"has {len(places)} image tokens, which are not {count} in a row for each image")
            spans.append((run[0], count))
            begin += count
        if begin != len(places):
            raise ValueError(f"has {len(places)} image tokens, but its {len(images)} images take {begin}")
        return tuple(spans)

    def tokens(self, size: tuple[int, int]) -> int:
        """How many tokens an image of (width, height) takes."""
        width, height = size
        counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(counts["num_image_tokens"][0])

    def features(self, images: Sequence[Image]) -> "dict[str, Tensor]":
        """What the model takes for images alone (pixel_values, image_grid_thw, …), concatenated over them."""
        found = self._processor.image_processor([image.open() for image in images], return_tensors="pt")
        unused = set(self._processor.unused_input_names)
        return {name: value for name, value in found.items() if name not in unused}

    def _replacement_of(self, size: tuple[int, int]) -> str:
        """What an image's placeholder becomes; it depends on nothing but the size, so a blank image is asked for it."""
        from PIL import Image as Pillow

        _, [text] = self._processor._process_images([Pillow.new("RGB", size)], return_tensors="pt")
        return str(text)
