"""Images of prompts and answers, and the number of tokens that each of them takes.

Nothing here imports Pillow, torch or Transformers before an image is read.
"""

import base64
import binascii
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote

from generation.messages import ChatForm, plain_ids

if TYPE_CHECKING:
    import PIL.Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# The formats that are read. Pillow has more, but starts programs to read some of them.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The bytes with which files of these formats begin.
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_MARK = re.compile("(<image>|<video>)")  # placeholders in rows for verl or LLaMA-Factory
_LONGEST_SOURCE = 100  # characters of an image's source in a sentence
# The most pixels of any image, Pillow's default (PIL.Image.MAX_IMAGE_PIXELS): 1/4 GiB at 24 bits.
_BOMB = 89_478_485

ChatMessages = Sequence[Mapping[str, Any]]
"""Messages, each with its role and its content, which is text or a list of parts."""

Spans = tuple[tuple[int, int], ...]
"""For each image, in order, the tokens whose embeddings its features replace: (index among the ids,
count).
"""


@contextmanager
def subject(name: str) -> Iterator[None]:
    """Put `name` before the message of a ValueError raised in the block. Such a message is a
    sentence without its subject, such as "is broken".
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the size of an image.

    Attributes:
        max_pixels: the largest image that is used as it is.
        larger: whether a larger image is refused or resized.
        decoded: the largest image, in pixels, that is decoded to be resized.
    """

    max_pixels: int = 1 << 22
    larger: Literal["refuse", "resize"] = "refuse"
    decoded: int = _BOMB


@dataclass(frozen=True)
class Image:
    """An encoded image. Two images are equal if their digests and sizes are.

    Attributes: data: the file's bytes. digest: SHA-256 of `data`, in hexadecimal digits. size:
        width and height in pixels, the right way up. name: its place in the data, such as "image 2
        of row 5 of train.jsonl"; empty for an image from elsewhere.
    """

    data: bytes = field(repr=False, compare=False)
    digest: str
    size: tuple[int, int]
    name: str = field(default="", compare=False)

    @classmethod
    def read(cls, source: Any, limits: ImageLimits = ImageLimits()) -> Self:
        """Read an image from a path, bytes, base64, a data or file URL, a Pillow image, or `bytes`
        and `path` of a dataset's column.

        An `Image` is returned as it is; other sources are decoded once, to check them. Raises
        ValueError, whose message is a sentence about the image without its subject: "is not an
        image …".
        """
        if isinstance(source, cls):
            return source
        data = _encoded(source)
        image = _decoded(data, limits)
        if image.width * image.height > limits.max_pixels:
            if limits.larger == "refuse":
                size = f"{image.width} x {image.height} pixels"
                raise ValueError(f"has {size}, more than data.max_image_pixels = {limits.max_pixels}")
            factor = (limits.max_pixels / (image.width * image.height)) ** 0.5
            image = image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))
            data = _png(image)
        return cls(data, hashlib.sha256(data).hexdigest(), image.size)

    def open(self) -> "PIL.Image.Image":
        """Return the decoded image: RGB, the right way up, on white where it is transparent."""
        return _decoded(self.data, ImageLimits(max_pixels=_BOMB))

    def data_url(self) -> str:
        """Return the file as a data URL, the form in which clients send images:
        data:image/…;base64.
        """
        from PIL import Image as Pillow

        kind = Pillow.open(io.BytesIO(self.data), formats=_FORMATS).get_format_mimetype()
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


def thumbnail(image: Image, side: int = 64) -> str:
    """Return a small copy of an image, as a data URL, for a page."""
    small = image.open()
    small.thumbnail((side, side))
    return "data:image/png;base64," + base64.b64encode(_png(small)).decode()


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
    if isinstance(source, str) and (data := base64_image(source)) is not None:
        return data
    if isinstance(source, str) and source.startswith("file:"):
        source = _path_of(source)
    if isinstance(source, str | Path):
        if "://" in str(source):
            raise ValueError(
                f"is a remote address ({str(source)[:60]}): give a file, bytes or a data URL"
            )
        try:
            return Path(source).read_bytes()
        except (OSError, ValueError) as error:  # a path with a null character is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot be read: {reason}: {_shortened(str(source))}") from error
    if hasattr(source, "convert") and hasattr(source, "size"):  # Pillow's
        return _png(_eight_bits(source))
    raise ValueError(
        f"is {type(source).__name__}, but must be a path, bytes, a data URL or a Pillow image"
    )


def base64_image(text: str) -> bytes | None:
    """Return the file that a text of bare base64 holds if it begins as an image does, otherwise
    None.
    """
    for length in (16, None):  # most texts are recognised by their beginning
        try:
            data = base64.b64decode(text[:length], validate=length is not None)
        except ValueError:
            return None
        if not data.startswith(_MAGIC):
            return None
    return data


def _path_of(url: str) -> Path:
    """Return the path of a file URL. Raises ValueError, as `Image.read`, if it is on another
    host.
    """
    path = url.removeprefix("file:")
    if path.startswith("//"):
        host, _, path = path.removeprefix("//").partition("/")
        if host not in ("", "localhost"):
            raise ValueError(
                f"is on another host ({_shortened(url)}): give a file of this one, bytes or a data URL"
            )
        path = f"/{path}"
    return Path(unquote(path))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SOURCE else f"{text[:_LONGEST_SOURCE]}…"


def _decoded(data: bytes, limits: ImageLimits) -> "PIL.Image.Image":
    from PIL import Image as Pillow
    from PIL import ImageOps

    resized = limits.larger == "resize"
    allowed = min(max(limits.max_pixels, limits.decoded) if resized else limits.max_pixels, _BOMB)
    try:
        with warnings.catch_warnings():
            # Pillow only warns above its limit; the check below raises an error.
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
            image: PIL.Image.Image = Pillow.open(io.BytesIO(data), formats=_FORMATS)
        pixels = image.width * image.height  # from the header: nothing has been decompressed yet
        if pixels > allowed:
            name = "data.max_image_pixels" if allowed < _BOMB and not resized else "any image may have"
            raise ValueError(f"has {image.width} x {image.height} pixels, more than {name} ({allowed})")
        image.load()
        image = _eight_bits(ImageOps.exif_transpose(image))
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


def _eight_bits(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Return an image of grey values with more than 8 bits as one with 8 bits, with the same black
    and white; return any other image unchanged.

    White is 65535 for 16 bits. For 32 bits it is 1 if all values are at most 1, else 255. Raises
    ValueError, as `Image.read` does, if values of 32 bits are below 0 or above white. Pillow's own
    conversion clips at 255 (https://github.com/python-pillow/Pillow/issues/3011).
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    import numpy
    from PIL import Image as Pillow

    values = numpy.asarray(image)
    low = float(values.min())
    high = float(values.max())
    white = 255
    if image.mode.startswith("I;16"):
        white = 65535
    elif image.mode == "F" and high <= 1:
        white = 1
    if not (low >= 0 and high <= white):  # NaN is outside, too
        numbers = f"numbers of 32 bits from {low:g} to {high:g}"
        raise ValueError(
            f"has {numbers}, which may mean any brightness: save it with 8 or 16 bits, or from 0 to 1"
        )
    return Pillow.fromarray(numpy.rint(values * (255 / white)).astype(numpy.uint8))


def _png(image: "PIL.Image.Image") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


@dataclass(frozen=True)
class StoredImage:
    """A dataset's image, which is not kept in memory, but read again whenever it is needed.

    Attributes:
        source: function that returns the image in a form that `Image.read` takes.
        digest, size: digest and size of the image when it was first read.
        limits: the limits with which it is read.
        name: its place in the data.
    """

    source: Callable[[], Any] = field(repr=False, compare=False)
    digest: str
    size: tuple[int, int]
    limits: ImageLimits = ImageLimits()
    name: str = "an image of the data"

    def read(self) -> Image:
        """Read the image. Raises ValueError, naming it, if it has changed since it was first
        read.
        """
        with subject(self.name):
            image = Image.read(self.source(), self.limits)
            if image.digest != self.digest:
                raise ValueError("has changed since the data were read: do not change data during a run")
        return replace(image, name=self.name)


@dataclass(frozen=True)
class PromptInput:
    """A prompt's token ids, its images, and the spans of ids that the images take."""

    ids: list[int]
    images: tuple[Image, ...] = ()
    spans: Spans = ()

    def followed_by(self, ids: list[int], images: tuple[Image, ...] = (), spans: Spans = ()) -> Self:
        """Return this input with further ids and images after it."""
        moved = tuple((len(self.ids) + start, length) for start, length in spans)
        return type(self)(self.ids + ids, self.images + images, self.spans + moved)


@dataclass(frozen=True)
class ImageRules:
    """The rules by which a run reads and limits images.

    Attributes:
        most: the largest number of images in a prompt and its answer together.
        max_bytes: the largest sum of the encoded sizes of one episode's images.
        fetch: whether clients' images at remote addresses are fetched.
    """

    processor: "ImageProcessor"
    limits: ImageLimits = ImageLimits()
    most: int = 1
    max_bytes: int = 1 << 25
    fetch: bool = False

    def read(self, sources: Sequence[Any]) -> tuple[Image, ...]:
        """Read images. Raises ValueError, whose message is a sentence without its subject, naming
        the first bad one.
        """
        if len(sources) > self.most:
            raise ValueError(f"has {len(sources)} images, more than data.max_images = {self.most}")
        return tuple(self.read_one(source, number) for number, source in enumerate(sources, start=1))

    def read_one(self, source: Any, number: int) -> Image:
        """Read the image of this number, counted from 1. Raises ValueError as `read` does."""
        with subject(f"has an image ({number}) that"):
            return Image.read(source, self.limits)

    def check_bytes(self, images: Iterable[Image], row_digests: Collection[str]) -> None:
        """Raise ValueError, whose message is a sentence without its subject, where the images of
        one episode are too large together. Images of the data's row, which have a digest in
        `row_digests`, do not count.
        """
        sizes = {image.digest: len(image.data) for image in images if image.digest not in row_digests}
        if (size := sum(sizes.values())) > self.max_bytes:
            most = self.max_bytes >> 20
            raise ValueError(f"has images of {size} bytes, more than rollout.max_image_mib = {most}")


class ImageProcessor:
    """A model's processor from Transformers: it turns text with images into token ids, and images
    into the tensors that the model takes.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the processor saved in `folder`. Raises ValueError if there is none for images."""
        from transformers import AutoProcessor

        options = {} if tokenizer is None else {"tokenizer": tokenizer}
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
        if getattr(processor, "image_processor", None) is None or not getattr(
            processor, "image_token", None
        ):
            raise ValueError(f"{folder} holds no processor for images (preprocessor_config.json)")
        self._processor = processor
        self.tokenizer: PreTrainedTokenizerBase = processor.tokenizer
        self.image_token: str = processor.image_token  # placeholder in text, once for each image
        self.form = ChatForm(self.render)
        self._replacement = functools.lru_cache(maxsize=4096)(self._replacement_of)
        self.marked = functools.lru_cache(maxsize=4096)(self._marked_of)

    def expand(
        self,
        prompt: str | ChatMessages,
        images: Sequence[Image],
        *,
        special: bool | None = None,
        **template: Any,
    ) -> tuple[list[int], Spans]:
        """Return the ids of a prompt, in which each image has as many tokens as it has features,
        and the images' spans.

        The prompt is text or messages. `special` says whether the tokenizer adds its special
        tokens; by default it adds them to text only, since a chat template writes its own.
        `template` holds arguments of the chat template; a generation prompt is added by default.
        Raises ValueError, whose message is a sentence about the prompt without its subject, where
        the prompt does not have one placeholder for each image.
        """
        text = prompt if isinstance(prompt, str) else self.render(prompt, **template)
        if (count := text.count(self.image_token)) != len(images):
            placeholders = f"{count} placeholders ({self.image_token}) for them in its text"
            raise ValueError(f"has {len(images)} images, but {placeholders}")
        if images:
            replacements = [self._replacement(image.size) for image in images]
            [text], _ = self._processor.get_text_with_replacements([text], replacements)
        special = isinstance(prompt, str) if special is None else special
        if special:
            [ids] = plain_ids(self.tokenizer, [text])
        else:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids, self.spans(ids, images)

    def render(self, messages: ChatMessages, **template: Any) -> str:
        """Return the chat template's text of messages, whose content may be lists of parts; images
        are not expanded.
        """
        settings = {"add_generation_prompt": True, **template}
        return str(
            self._processor.apply_chat_template([*map(dict, messages)], tokenize=False, **settings)
        )

    def spans(self, ids: Sequence[int], images: Sequence[Image]) -> Spans:
        """Return the spans of the images' tokens in expanded ids, none of which may have been
        sampled.
        """
        if not images:
            return ()
        [kinds] = self._processor.create_mm_token_type_ids([list(ids)])
        indices = [index for index, kind in enumerate(kinds) if kind == 1]
        spans = []
        begin = 0
        for image in images:
            count = self.tokens(image.size)
            run = indices[begin : begin + count]
            if len(run) < count or run[-1] - run[0] != count - 1:
                raise ValueError(
                    f"has {len(indices)} image tokens, but not {count} in a row for one of its images"
                )
            spans.append((run[0], count))
            begin += count
        if begin != len(indices):
            raise ValueError(
                f"has {len(indices)} image tokens, but its {len(images)} images take {begin}"
            )
        return tuple(spans)

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the number of tokens that an image of (width, height) pixels takes."""
        width, height = size
        counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(counts["num_image_tokens"][0])

    def features(self, images: Sequence[Image]) -> "dict[str, Tensor]":
        """Return the model's inputs for images (pixel_values, image_grid_thw, …), concatenated over
        the images.
        """
        inputs, _ = self._processor._process_images(
            [image.open() for image in images], return_tensors="pt"
        )
        unused = set(self._processor.unused_input_names)
        return {name: value for name, value in inputs.items() if name not in unused}

    def _marked_of(self, size: tuple[int, int]) -> frozenset[int]:
        """Return the indices, among an image's tokens, of those that are not replaced by features,
        such as the tokens for an end of a line.
        """
        of_images = set(self._processor.image_token_ids)
        if len(of_images) == 1:
            return frozenset()
        ids = self.tokenizer(self._replacement(size), add_special_tokens=False)["input_ids"]
        tokens = [token for token in ids if token in of_images]
        return frozenset(n for n, token in enumerate(tokens) if token != self._processor.image_token_id)

    def _replacement_of(self, size: tuple[int, int]) -> str:
        """Return the text that replaces an image's placeholder. It depends on the image's size
        alone, so it is made with a blank image.
        """
        from PIL import Image as Pillow

        _, [text] = self._processor._process_images([Pillow.new("RGB", size)], return_tensors="pt")
        return str(text)
