"""Makes requests to vLLM that carry images, at places among the ids that the caller names.

vLLM would look for placeholders among a prompt's ids, and would mistake an image token that the policy has sampled for
one (https://github.com/modelscope/ms-swift/issues/9287). Therefore its processor is given each image alone. It returns
the features that the model computes with, and the number of tokens, which must be the caller's
(https://github.com/huggingface/trl/issues/6401). The private parts of vLLM that are used here are those of 0.32.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from generation.images import Image, PromptInput

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer

KEPT_BYTES = 1 << 28
"""Bytes of processed images that an engine's process caches; the least recently used are dropped first."""


class ImageCountError(ValueError):
    """Raised where engine and trainer disagree on an image's tokens: they would compute with different prompts."""


class EngineImages:
    """Makes vLLM's inputs from ids and images. Coroutines run on the engine's loop, the processor on a thread."""

    def __init__(self, renderer: "BaseRenderer") -> None:
        self._renderer = renderer
        self._lock = asyncio.Lock()
        self._processed: OrderedDict[str, tuple[Any, list[int]]] = OrderedDict()

    async def prompt(self, inputs: PromptInput) -> dict[str, Any]:
        """Returns a prompt with images as `AsyncLLM.generate` takes it. Raises ImageCountError with the counts."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids, images, spans = inputs.ids, inputs.images, inputs.spans
        if len(images) != len(spans):
            raise ImageCountError(f"there are {len(images)} images, but places for {len(spans)}")
        items = []
        for number, (image, (start, length)) in enumerate(zip(images, spans, strict=True), start=1):
            item, tokens = await self._processed_image(image)
            if ids[start : start + length] != tokens:
                name, (width, height) = image.name or f"image {number}", image.size
                counts = f"takes {len(tokens)} tokens in the engine, but {length} in the trainer, or different ones"
                remedy = "both must have the same processor (preprocessor_config.json)"
                raise ImageCountError(f"{name} ({width} x {height} pixels) {counts}: {remedy}")
            items.append(item)
        kwargs, hashes = MultiModalKwargsItems({"image": items}), {"image": [image.digest for image in images]}
        places = {"image": [PlaceholderRange(start, length) for start, length in spans]}
        return dict(mm_input(ids, mm_kwargs=kwargs, mm_hashes=hashes, mm_placeholders=places))

    async def _processed_image(self, image: Image) -> tuple[Any, list[int]]:
        """Returns an image's processed features, and the token ids whose embeddings the features replace."""
        async with self._lock:
            if image.digest not in self._processed:
                self._processed[image.digest] = await asyncio.to_thread(self._process, image)
            self._processed.move_to_end(image.digest)
            processed = self._processed[image.digest]
            while len(self._processed) > 1 and sum(map(_bytes, self._processed.values())) > KEPT_BYTES:
                self._processed.popitem(last=False)
            return processed

    def _process(self, image: Image) -> tuple[Any, list[int]]:
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        processor = self._renderer.get_mm_processor()
        items = processor.info.parse_mm_data({"image": [image.open()]})
        inputs = ProcessorInputs([], items, hf_processor_mm_kwargs={})
        result = processor._apply_hf_processor(inputs, TimingContext(enabled=False))
        content = result.prompt_updates["image"][0][0].content
        tokens, embedded = content.full, content.is_embed
        if embedded is not None:
            tokens = [token for token, is_image in zip(tokens, embedded(tokens).tolist(), strict=True) if is_image]
        return result.kwargs["image"][0], list(tokens)


def _bytes(processed: tuple[Any, list[int]]) -> int:
    return sum(value.nbytes for value in processed[0].get_data().values() if hasattr(value, "nbytes"))
