"""Read the images in clients' requests as the run reads its own, and expand their placeholders as
the run does.

vLLM renders the chat, whichever dialect it came in. It neither fetches nor decodes an image, nor
does it decide where an image stands in the prompt. Two methods of its renderer are replaced for
that; they are those of vLLM 0.32.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from generation.exact_ids import KnownPrefix
from generation.images import Image, ImageRules, PromptInput, subject
from generation.server.conversations import CURRENT, Refused
from generation.server.fetching import fetch

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer


DECODED = 1 << 25
"""The most pixels of a client's image that is decoded to be made smaller; at 12 bytes a pixel, that
takes 384 MiB.
"""


def continued(
    rendered: PromptInput, exact: KnownPrefix, ids: list[int], rules: ImageRules
) -> PromptInput:
    """Return a rendered prompt with other ids: `ids`, which begin with the exact ids unless those
    could not be kept.

    The ids after the exact ids are the end of `rendered`, so images there have the same place,
    counted from the end. Images within the exact ids have the places that they had in the captured
    answer. Raises Refused where the messages have other images than the captured answer.
    """
    begin = len(exact.ids)
    if ids == rendered.ids or ids[:begin] != exact.ids:
        return rendered
    moved = len(ids) - len(rendered.ids)
    rest = len(rendered.ids) - (len(ids) - begin)
    later = [(start + moved, length) for start, length in rendered.spans if start >= rest]
    earlier = rendered.images[: len(rendered.images) - len(later)]
    if exact.answer is None:
        try:
            return PromptInput(
                ids, rendered.images, (*rules.processor.spans(exact.ids, earlier), *later)
            )
        except ValueError as error:
            raise Refused(400, f"the request {error}: its ids are not those of its messages") from error
    if exact.answer.images != earlier:
        raise Refused(400, "the images of the messages are not those of the answer that they continue")
    return PromptInput(ids, rendered.images, (*exact.answer.image_spans, *later))


def serve_images(renderer: "BaseRenderer", rules: ImageRules) -> None:
    """Have the renderer of a running engine read images as `rules` say, and note them in the call
    that it serves.
    """
    rules = replace(rules, limits=replace(rules.limits, decoded=DECODED))
    # A single thread: images are decoded one at a time, to save memory
    decoder = ThreadPoolExecutor(1, "images")
    render = type(renderer).render_messages_async
    tokenize = renderer._tokenize_prompt_async

    async def render_messages(messages: Sequence[Any], params: Any) -> Any:
        return await render(renderer, await _with_images(messages, rules, decoder), params)

    async def tokenize_prompt(prompt: Any, params: Any) -> Any:
        media = prompt.get("multi_modal_data") or {}
        if not media:
            return await tokenize(prompt, params)
        images = tuple(media.get("image", ()))
        with _refused_to_client():
            if [*media] != ["image"] or not all(isinstance(image, Image) for image in images):
                raise ValueError("has images in a form that is not served: send them as image_url")
            special = params.add_special_tokens
            ids, spans = await asyncio.to_thread(
                rules.processor.expand, prompt["prompt"], images, special=special
            )
        if (call := CURRENT.get()) is not None:
            call.expanded = PromptInput(ids, images, spans)
        return {"prompt": prompt["prompt"], "prompt_token_ids": ids}

    renderer.render_messages_async = render_messages  # type: ignore[method-assign]
    renderer._tokenize_prompt_async = tokenize_prompt


@contextmanager
def _refused_to_client() -> Iterator[None]:
    """Turn a ValueError into a `Refused` that the client gets; its text is a sentence that lacks
    "the request".
    """
    try:
        yield
    except ValueError as error:
        refused = Refused(400, f"the request {error}")
        if (call := CURRENT.get()) is not None:
            call.refused = refused
        raise refused from error


async def _with_images(messages: Sequence[Any], rules: ImageRules, decoder: Executor) -> list[Any]:
    """Return the messages with their images read. Raises Refused where one cannot be read."""
    copies = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    image_parts: list[tuple[list[Any], int]] = []
    for message in copies:
        if not isinstance(message, dict) or isinstance(content := message.get("content"), str | None):
            continue
        message["content"] = parts = list(content)  # pydantic's iterators can be read only once
        image_parts += [(parts, index) for index, part in enumerate(parts) if _is_image(part)]
    if not image_parts:
        return copies
    with _refused_to_client():
        if len(image_parts) > rules.most:
            raise ValueError(f"has {len(image_parts)} images, more than data.max_images = {rules.most}")
        urls = (parts[index].get("image_url") for parts, index in image_parts)
        images: tuple[Image, ...] = ()
        for number, url in enumerate(urls, start=1):
            # One at a time, so that other requests have their turn between
            source = await _source(url, number, rules)
            images += (
                await asyncio.get_running_loop().run_in_executor(
                    decoder, rules.read_one, source, number
                ),
            )
        if (call := CURRENT.get()) is not None:  # else the request asks for no answer, but for ids
            images = call.admit(images, rules)
    for (parts, index), image in zip(image_parts, images, strict=True):
        parts[index] = {"type": "image_pil", "image_pil": image}  # vLLM passes such parts on unchanged
    return copies


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and (
        part.get("type") in ("image_url", "input_image") or "image_url" in part
    )


async def _source(source: Any, number: int, rules: ImageRules) -> Any:
    """Return a data URL, or the bytes fetched from a remote one. Raises ValueError for anything
    else, which would be read as a file of this machine.
    """
    source = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(source, str) or not source.startswith(("data:", "http://", "https://")):
        raise ValueError(f"has an image ({number}) without a data URL: send data:image/…;base64")
    if source.startswith("data:"):
        return source
    if not rules.fetch:
        remedy = "send it as a data URL, or have it fetched (rollout.fetch_images: true, --fetch-images)"
        raise ValueError(f"has an image ({number}) at a remote address ({source[:60]}): {remedy}")
    with subject(f"has an image ({number}) that"):
        return await fetch(source, rules.max_bytes)
