"""Images in the policy: the encoder of a multimodal model, and the way of its features to the
placeholder tokens.

Nothing here depends on an architecture. Transformers says which module is the encoder
(`get_encoder`), which arguments its features need (`get_image_features`), whether rotary positions
have several axes (`get_rope_index`), and takes the features (`mm_encoder_outputs`).

A trunk finds the placeholders of images by their id. This module finds them by their place in the
row, since a policy may sample the placeholder's id, which is then an ordinary token, also for the
engine (https://github.com/modelscope/ms-swift/issues/9287).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from PIL import Image as Pillow
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from generation.images import Image, ImageProcessor
from trainer.errors import UserError
from trainer.model_structure import image_token
from trainer.policy.attention import NAME, looks_ahead, mask_images, require_packing
from trainer.policy.packing import pack_indices
from trainer.types import MicroBatch


class Vision:
    """A preparer of micro-batches' images for a trunk."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor) -> None:
        """Read what the trunk needs. Raises UserError if the trunk does not take the features of
        images.
        """
        trunk = model.base_model
        asked = inspect.signature(trunk.get_image_features).parameters
        taken = inspect.signature(trunk.forward).parameters
        if "mm_encoder_outputs" not in taken or not hasattr(trunk, "get_placeholder_mask"):
            raise UserError(
                f"{type(model).__name__} does not take the features of images: use another model, or "
                "a later release of Transformers"
            )
        self._trunk: Any = trunk
        vision = model.config.vision_config
        # Numbers per patch
        self._patch = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
        self._blank_image = Image.read(Pillow.new("RGB", (32, 32)))
        self._blank = processor.features([self._blank_image])
        # The argument that says which tokens are of images, if these attend to later ones as well.
        self._kinds = "token_type_ids" if "token_type_ids" in taken else "mm_token_type_ids"
        self._bidirectional = looks_ahead(trunk)
        self._switches = (
            self._bidirectional and trunk.config.get_text_config()._attn_implementation == NAME
        )
        self._processor = processor
        self._asked = list(asked)

    def image_token(self, model: PreTrainedModel) -> float:
        """Return the encoder's activations per image token, by what the processor makes of a blank
        image.
        """
        patches = (
            self._blank["pixel_values"].numel()
            / self._patch
            / self._processor.tokens(self._blank_image.size)
        )
        return image_token(model, patches)

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the images of a micro-batch, for `hidden`.

        A micro-batch without images gets a blank one, whose features are not used: all ranks must
        enter the collectives of the encoder's shards, whatever their rows contain
        (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819).
        """
        device = batch.input_ids.device
        pack = batch.layout.pack
        width = batch.input_ids.shape[1] - 1
        sizes = pack.lengths if pack else [width] * len(batch.lengths)
        starts = torch.tensor([0, *sizes]).cumsum(0)
        spans = batch.images
        indices = starts[: len(batch.lengths), None] + torch.arange(width)
        encoded = [span.image for span in spans]
        if pack and pack.tree:
            # An image of a common beginning is there once, and equal ones are encoded once
            indices = pack_indices(pack.tree.trie, starts, width)
            first = {int(indices[span.row, span.start]): span for span in reversed(spans)}
            spans = [first[index] for index in sorted(first)]
            encoded = list({span.image.digest: span.image for span in spans}.values())
        images = self._processor.features(encoded) if spans else self._blank
        inputs: dict[str, Any] = {
            "features": {n: images[n].to(device) for n in self._asked if n in images}
        }
        inputs["patches"] = images["pixel_values"].numel() // self._patch
        if spans:
            if pack:
                require_packing(self._trunk, images=True)
            inputs["named"] = {}
            numbers = {image.digest: number for number, image in enumerate(encoded)}
            if len(encoded) < len(spans):
                inputs["numbers"] = [numbers[span.image.digest] for span in spans]
            tokens = []
            for span in spans:
                marks = self._processor.marked(span.image.size)
                run = indices[span.row, span.start : span.start + span.length].tolist()
                tokens.append([index for n, index in enumerate(run) if n not in marks])
            inputs["lengths"] = [len(some) for some in tokens]
            inputs["names"] = [span.image.name for span in spans]
            image_tokens = torch.tensor([*chain.from_iterable(tokens)])
            # On this rank
            begin, end = (pack.begin, pack.begin + len(pack.tokens)) if pack else (0, sum(sizes))
            if batch.ways > 1:
                here = ((image_tokens >= begin) & (image_tokens < end)).nonzero().squeeze(1)
                inputs["here"], image_tokens = here.to(device), image_tokens[here] - begin
            inputs["places"] = image_tokens.to(device)
            if hasattr(self._trunk, "get_rope_index"):
                positions = self._positions(batch, sizes, numbers, images)
                inputs["named"]["position_ids"] = positions[..., begin:end].to(device)
            if self._bidirectional:
                kinds = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
                kinds[inputs["places"]] = 1
                inputs["named"][self._kinds] = kinds.view(len(sizes), -1)
        return inputs

    def _positions(
        self, batch: MicroBatch, sizes: list[int], numbers: dict[str, int], images: dict[str, Tensor]
    ) -> Tensor:
        """Return rotary positions by axis, [axes, B, T] or [axes, 1, N] for a pack, where each
        sequence begins at 0.

        Positions that continue through a pack are a known mistake
        (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819). `numbers` are the places in
        `images`, by digest.
        """
        tables = []
        pack = batch.layout.pack
        wanted = inspect.signature(self._trunk.get_rope_index).parameters
        runs = [(row, 0, size) for row, size in enumerate(sizes)]
        if pack and pack.tree:
            # No run begins or ends within an image, since its tokens are equal or different as one
            runs = [(node.row, node.begin, node.end) for node in pack.tree.trie[0]]
        for row, begin, end in runs:
            inside = [span for span in batch.images if span.row == row and span.start < end]
            kinds = torch.zeros(1, end, dtype=torch.int64)
            for span in inside:
                kinds[0, span.start : span.start + span.length] = 1
            chosen = [numbers[span.image.digest] for span in inside]
            grids = {n: images[n][chosen] for n in wanted if n in images}
            if inside:
                ids = torch.zeros_like(kinds)  # only their number is read
                tables.append(
                    self._trunk.get_rope_index(ids, mm_token_type_ids=kinds, **grids)[0][..., begin:]
                )
            else:
                tables.append(torch.arange(begin, end).view(1, 1, -1))
        axes = max(len(table) for table in tables)
        return torch.cat([table.expand(axes, -1, -1) for table in tables], dim=2 if pack else 1)

    def hidden(self, inputs: Tensor, images: dict[str, Any], packing: dict[str, Any]) -> Tensor:
        """Return the trunk's last hidden states [B, T, H] for ids [B, T] and images that `inputs`
        returned.

        Raises ValueError if an image does not have as many features as placeholder tokens.
        """
        if self._switches:
            mask_images(self._trunk, masked="places" in images)
        features = self._trunk.get_image_features(**images["features"], return_dict=True)
        if "places" not in images:
            with _placeholders(self._trunk, inputs):
                hidden = self._trunk(input_ids=inputs, use_cache=False, **packing).last_hidden_state
            return cast(Tensor, _Beside.apply(hidden, *_read(features)))
        if "numbers" in images:
            _repeat(features, images["numbers"])
        lengths = [len(image) for image in features.pooler_output]
        if lengths != images["lengths"]:  # https://github.com/verl-project/verl/issues/3469
            named = ", ".join(name or "an image" for name in images["names"])
            raise ValueError(
                f"{named}: they have {lengths} features, but {images['lengths']} placeholder tokens"
            )
        if "here" in images:
            _keep(features, images["here"])
        named = packing | images["named"] | {"mm_encoder_outputs": {"image": features}}
        with _placeholders(self._trunk, inputs, images["places"]):
            outputs = self._trunk(input_ids=inputs, use_cache=False, **named)
        return cast(Tensor, outputs.last_hidden_state)


@contextmanager
def _placeholders(trunk: Any, inputs: Tensor, indices: Tensor | None = None) -> Iterator[None]:
    """Return a context in which the trunk finds images only at these places of its flattened input,
    or nowhere.
    """
    marked = torch.full_like(inputs, -1).view(-1)
    if indices is not None:
        marked[indices] = trunk.config.image_token_id
    by_id = trunk.get_placeholder_mask
    trunk.get_placeholder_mask = lambda ids, *rest, **named: by_id(
        marked.view_as(inputs), *rest, **named
    )
    try:
        yield
    finally:
        del trunk.get_placeholder_mask


def _repeat(features: Any, numbers: list[int]) -> None:
    """Make features those of images with these numbers, which may occur several times."""
    features.pooler_output = [features.pooler_output[number] for number in numbers]
    if layers := getattr(features, "deepstack_features", None):
        repeated = []
        for layer in layers:
            repeated.append([layer[number] for number in numbers])
        features.deepstack_features = repeated


def _keep(features: Any, here: Tensor) -> None:
    """Reduce features to those of tokens on this rank, whose indices among those of all images are
    `here`.

    Every rank that shares the tokens has computed all features; in backward each gets the gradient
    of its tokens.
    """
    features.pooler_output = [torch.cat([*features.pooler_output]).index_select(0, here)]
    if layers := getattr(features, "deepstack_features", None):
        features.deepstack_features = [[torch.cat([*layer]).index_select(0, here)] for layer in layers]


def _read(features: Any) -> list[Tensor]:
    """Return the features that trunks read, out of an encoder's outputs."""
    lists = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    tensors: list[Tensor] = []
    for item in lists:
        if isinstance(item, Tensor):
            tensors.append(item)
        else:
            tensors += item
    return tensors


class _Beside(torch.autograd.Function):
    """The identity of hidden states; in backward the other tensors get gradients that are exactly
    zero.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *beside: Tensor) -> Tensor:
        ctx.save_for_backward(*beside)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
