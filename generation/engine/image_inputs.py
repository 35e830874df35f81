"""Make requests to vLLM that carry images, at places among the ids that the caller names.

vLLM would look for placeholders among a prompt's ids, and would mistake an image token that the
policy has sampled for one (https://github.com/modelscope/ms-swift/issues/9287). Therefore its
processor is given each image alone. It returns the features that the model computes with, and the
number of tokens, which must be the caller's (https://github.com/huggingface/trl/issues/6401). The
private parts of vLLM that are used here are those of 0.32.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from generation.images import Image, PromptInput

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer

KEPT_BYTES = 1 << 28
"""Bytes of processed images that an engine's process caches; the least recently used are dropped
first.
"""


class ImageCountError(ValueError):
    """Raised where engine and trainer disagree on an image's tokens: they would compute with
    different prompts.
    """


class _Processed(NamedTuple):
    """An image as the engine's processor returns it.

    Attributes: item: what the model computes its features from. tokens: the ids of its tokens, such
        as marks of its begin, of ends of lines, and one for each feature. embedded: whether a
        feature replaces the token's embedding.
    """

    item: Any
    tokens: list[int]
    embedded: list[bool]


class EngineImages:
    """Makes vLLM's inputs from ids and images. Coroutines run on the engine's loop, the processor
    on a thread.
    """

    def __init__(self, renderer: "BaseRenderer") -> None:
        self._renderer = renderer
        self._lock = asyncio.Lock()
        self._processed: OrderedDict[str, _Processed] = OrderedDict()

    async def prompt(self, inputs: PromptInput) -> dict[str, Any]:
        """Return a prompt with images as `AsyncLLM.generate` takes it. Raises ImageCountError with
        the counts.
        """
        import torch
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids = inputs.ids
        images = inputs.images
        spans = inputs.spans
        if len(images) != len(spans):
            raise ImageCountError(f"there are {len(images)} images, but places for {len(spans)}")
        items = []
        ranges = []
        for number, (image, (start, length)) in enumerate(zip(images, spans, strict=True), start=1):
            item, tokens, embedded = await self._processed_image(image)
            if (first := _found(ids[start : start + length], tokens, embedded)) is None:
                name = image.name or f"image {number}"
                (width, height) = image.size
                counts = (
                    f"takes {sum(embedded)} tokens in the engine, but {length} in the trainer, or "
                    "different ones"
                )
                remedy = "both must have the same processor (preprocessor_config.json)"
                raise ImageCountError(f"{name} ({width} x {height} pixels) {counts}: {remedy}")
            items.append(item)
            taken = embedded[first : first + length]
            ranges.append(
                PlaceholderRange(start, length, is_embed=None if all(taken) else torch.tensor(taken))
            )
        kwargs = MultiModalKwargsItems({"image": items})
        hashes = {"image": [image.digest for image in images]}
        return dict(mm_input(ids, mm_kwargs=kwargs, mm_hashes=hashes, mm_placeholders={"image": ranges}))

    async def _processed_image(self, image: Image) -> _Processed:
        async with self._lock:
            if image.digest not in self._processed:
                self._processed[image.digest] = await asyncio.to_thread(self._process, image)
            self._processed.move_to_end(image.digest)
            processed = self._processed[image.digest]
            while len(self._processed) > 1 and sum(map(_bytes, self._processed.values())) > KEPT_BYTES:
                self._processed.popitem(last=False)
            return processed

    def _process(self, image: Image) -> _Processed:
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        processor = self._renderer.get_mm_processor()
        items = processor.info.parse_mm_data({"image": [image.open()]})
        inputs = ProcessorInputs([], items, hf_processor_mm_kwargs={})
        result = processor._apply_hf_processor(inputs, TimingContext(enabled=False))
        content = result.prompt_updates["image"][0][0].content
        tokens = list(content.full)
        embedded = content.is_embed
        taken = [True] * len(tokens) if embedded is None else embedded(tokens).tolist()
        return _Processed(result.kwargs["image"][0], tokens, taken)


def _found(ids: list[int], tokens: list[int], embedded: list[bool]) -> int | None:
    """Return where among an image's tokens the trainer's `ids` for it begin; None unless they have
    all features.
    """
    for first in range(len(tokens) - len(ids) + 1):
        part = slice(first, first + len(ids))
        if tokens[part] == ids and sum(embedded[part]) == sum(embedded):
            return first
    return None


def _bytes(processed: _Processed) -> int:
    return sum(value.nbytes for value in processed.item.get_data().values() if hasattr(value, "nbytes"))
