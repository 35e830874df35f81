"""Find the places of images in the texts and messages of a row."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass
from generation.images import _MARK, ChatMessages


def split_images(
    messages: ChatMessages, sources_elsewhere: Sequence[Any] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages in which an image is `{"type": "image"}` and nothing more, and the images'
    sources in order.

    A part of a message either holds its image (`image`, `url`, `path`, `base64`, or OpenAI's
    `image_url`), or is the place of the next of `sources_elsewhere`. If the messages have no
    images, `sources_elsewhere` are put before the text of the first user message. Raises
    ValueError, whose message is a sentence without its subject, where places and sources are not
    equally many.
    """
    rest = iter(sources_elsewhere)
    plain = []
    sources = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [
                dict(part) if isinstance(part, Mapping) else {"type": "text", "text": part}
                for part in content
            ]
            placed: list[dict[str, Any]] = []
            for part in parts:
                kind = part.get("type")
                if kind in ("image", "image_url"):
                    source = _source_in(part)
                    if source is None:
                        source = next(rest, None)
                    if source is None:
                        raise ValueError("has a place for an image, but no image for it")
                    sources.append(source)
                    placed.append({"type": "image"})
                elif kind in ("text", None) and isinstance(part.get("text"), str):
                    placed.append({"type": "text", "text": part["text"]})
                else:
                    raise ValueError(
                        f"has a message with a part of the type {kind!r}: it must be text or image"
                    )
            message = {**message, "content": placed}
        plain.append(dict(message))
    left = list(rest)
    first = next((message for message in plain if message.get("role") == "user"), None)
    if left and not sources and first is not None:
        text = first.get("content") or ""
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        first["content"] = [*({"type": "image"} for _ in left), *parts]
        return plain, left
    if left:
        raise ValueError(f"has {len(left)} images without a place in its messages")
    return plain, sources


def with_image_parts(messages: ChatMessages) -> list[dict[str, Any]]:
    """Return messages in which each mark `<image>` in a text is the place of an image, `{"type":
    "image"}`.

    An assistant's text stays as it is. Raises ValueError, whose message is a sentence without its
    subject, for a mark `<video>`.
    """
    placed = []
    for message in map(dict, messages):
        content = message.get("content")
        if content and message.get("role") != "assistant":
            parts = [content] if isinstance(content, str) else list(content)
            pieces = [piece for part in parts for piece in _split_at_marks(part)]
            if pieces != parts:
                message["content"] = pieces
        placed.append(message)
    return placed


def _split_at_marks(part: Any) -> list[Any]:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or _MARK.search(text) is None:
        return [part]
    pieces: list[Any] = []
    for piece in filter(None, _MARK.split(text)):
        if piece == "<video>":
            raise ValueError(
                "has the mark <video> in its text, but videos are not read: leave the row out"
            )
        pieces.append({"type": "image"} if piece == "<image>" else {"type": "text", "text": piece})
    return pieces


def _source_in(part: Mapping[str, Any]) -> Any:
    for name in ("image", "image_url", "url", "path"):
        if (source := part.get(name)) is not None:
            return source.get("url") if name == "image_url" and isinstance(source, Mapping) else source
    return None if part.get("base64") is None else f"data:image/png;base64,{part['base64']}"
