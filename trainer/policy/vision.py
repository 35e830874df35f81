"""Images in the policy: which part of a model sees, and how what it sees gets to the tokens that stand for it.

Nothing here knows an architecture. Transformers says which module is the encoder (`get_encoder`), which arguments its
features need (`get_image_features`), whether rotary positions have axes of their own (`get_rope_index`), and takes the
features (`mm_encoder_outputs`).

A trunk finds the placeholders of images by their id. Here they are found by their place in the row: a policy may sample
the placeholder's id, which is a token like any other then, for the engine as well
(https://github.com/modelscope/ms-swift/issues/9287).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from PIL import Image as Pillow
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from generation.images import Image, ImageProcessor
from trainer.errors import UserError
from trainer.model_structure import decoder, encoder_layers
from trainer.types import MicroBatch


class Vision:
    """The images of micro-batches, as a trunk takes them."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor) -> None:
        """Raises UserError where the trunk does not take the features of images."""
        trunk = model.base_model
        asked, taken = (inspect.signature(call).parameters for call in (trunk.get_image_features, trunk.forward))
        if "mm_encoder_outputs" not in taken or not hasattr(trunk, "get_placeholder_mask"):
            raise UserError(f"{type(model).__name__} does not take the features of images: use another model")
        self._trunk: Any = trunk
        vision = model.config.vision_config
        self._patch = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)  # the numbers in one
        self._blank_image = Image.read(Pillow.new("RGB", (32, 32)))
        self._blank = processor.features([self._blank_image])
        self._bidirectional = "token_type_ids" in taken  # between the tokens of an image
        self._processor, self._asked = processor, list(asked)

    def image_token(self, model: PreTrainedModel) -> float:
        """The activations of the encoder for an image's token, in those of the decoder for a token: `ModelFlops`'s.

        Both are taken to grow with layers and hidden size. Example: in Qwen2.5-VL's 7B model four patches are a token,
        and 32 blocks of 1280 are 1.6 times 28 layers of 3584, for each token of an image.
        """
        size = len(decoder(model).layers) * model.config.get_text_config().hidden_size
        patches = self._blank["pixel_values"].numel() / self._patch / self._processor.tokens(self._blank_image.size)
        return patches * len(encoder_layers(model)) * model.config.vision_config.hidden_size / size

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """The images of a micro-batch, as `hidden` takes them.

        A micro-batch without images has a blank one, which nothing is read of: all ranks must enter the collectives of
        the encoder's shards, whatever their rows hold (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819).
        """
        device = batch.input_ids.device
        places = batch.images
        found = self._processor.features([place.image for place in places]) if places else self._blank
        inputs: dict[str, Any] = {"features": {n: found[n].to(device) for n in self._asked if n in found}}
        inputs["patches"] = found["pixel_values"].numel() // self._patch
        if places:
            pack = batch.layout.pack
            sizes = pack.lengths if pack else [batch.input_ids.shape[1] - 1] * len(batch.lengths)
            starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
            spans = [(starts[place.row] + place.start, place.length) for place in places]
            inputs["named"] = {}
            inputs["lengths"] = [length for _, length in spans]
            inputs["names"] = [place.image.name for place in places]
            image_tokens = torch.cat([torch.arange(first, first + n) for first, n in spans])
            begin, end = (pack.begin, pack.begin + len(pack.tokens)) if pack else (0, sum(sizes))  # on this rank
            if batch.ways > 1:
                here = ((image_tokens >= begin) & (image_tokens < end)).nonzero().squeeze(1)
                inputs["here"], image_tokens = here.to(device), image_tokens[here] - begin
            inputs["places"] = image_tokens.to(device)
            if hasattr(self._trunk, "get_rope_index"):
                positions = self._positions(batch, sizes, found)
                inputs["named"]["position_ids"] = positions[..., begin:end].to(device)
            if self._bidirectional:
                kinds = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
                kinds[inputs["places"]] = 1
                inputs["named"]["token_type_ids"] = kinds.view(len(sizes), -1)
        return inputs

    def _positions(self, batch: MicroBatch, sizes: list[int], found: dict[str, Tensor]) -> Tensor:
        """Rotary positions by axis, [axes, B, T] or of a pack [axes, 1, N]: each sequence begins at 0.

        (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819)
        """
        tables, first = [], 0
        wanted = inspect.signature(self._trunk.get_rope_index).parameters
        for row, size in enumerate(sizes):
            own = [place for place in batch.images if place.row == row]
            kinds = torch.zeros(1, size, dtype=torch.int64)
            for place in own:
                kinds[0, place.start : place.start + place.length] = 1
            last = first + len(own)
            grids = {n: found[n][first:last] for n in wanted if n in found}
            first = last
            if own:
                ids = torch.zeros_like(kinds)  # of which only the number is read
                tables.append(self._trunk.get_rope_index(ids, mm_token_type_ids=kinds, **grids)[0])
            else:
                tables.append(torch.arange(size).view(1, 1, -1))
        axes = max(len(table) for table in tables)
        dim = 2 if batch.layout.pack else 1
        return torch.cat([table.expand(axes, -1, -1) for table in tables], dim=dim)

    def hidden(self, inputs: Tensor, seen: dict[str, Any], packing: dict[str, Any]) -> Tensor:
        """The trunk's last hidden states [B, T, H] for ids [B, T] and the images that `inputs` gave.

        Raises ValueError where an image has not as many features as tokens that stand for it.
        """
        features = self._trunk.get_image_features(**seen["features"], return_dict=True)
        if "places" not in seen:
            hidden = self._trunk(input_ids=inputs, use_cache=False, **packing).last_hidden_state
            return cast(Tensor, _Beside.apply(hidden, *_read(features)))
        lengths = [len(each) for each in features.pooler_output]
        if lengths != seen["lengths"]:  # https://github.com/verl-project/verl/issues/3469
            named = ", ".join(name or "an image" for name in seen["names"])
            raise ValueError(f"{named}: they have {lengths} features, and {seen['lengths']} tokens stand for them")
        if "here" in seen:
            _keep(features, seen["here"])
        named = packing | seen["named"] | {"mm_encoder_outputs": {"image": features}}
        with _placeholders(self._trunk, inputs, seen["places"]):
            found = self._trunk(input_ids=inputs, use_cache=False, **named)
        return cast(Tensor, found.last_hidden_state)


@contextmanager
def _placeholders(trunk: Any, inputs: Tensor, places: Tensor) -> Iterator[None]:
    """Inside, the trunk finds images at these places of its flattened input alone."""
    marked = torch.full_like(inputs, -1).view(-1)
    marked[places] = trunk.config.image_token_id
    by_id = trunk.get_placeholder_mask
    trunk.get_placeholder_mask = lambda ids, *others, **named: by_id(marked.view_as(inputs), *others, **named)
    try:
        yield
    finally:
        del trunk.get_placeholder_mask


def _keep(features: Any, here: Tensor) -> None:
    """Leave the features of tokens on this rank alone, `here` being their indices among those of all images.

    Every rank that shares the tokens has computed all; backward gives each a gradient by its own tokens.
    """
    features.pooler_output = [torch.cat([*features.pooler_output]).index_select(0, here)]
    if layers := getattr(features, "deepstack_features", None):
        features.deepstack_features = [[torch.cat([*layer]).index_select(0, here)] for layer in layers]


def _read(features: Any) -> list[Tensor]:
    """The features that trunks read, of all that an encoder gives."""
    lists = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    return [tensor for each in lists for tensor in ([each] if isinstance(each, Tensor) else each)]


class _Beside(torch.autograd.Function):
    """Hidden states as they are; in backward, tensors beside them get gradients of zero, bit for bit."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *beside: Tensor) -> Tensor:
        ctx.save_for_backward(*beside)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
