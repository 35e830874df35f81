"""Rows of text and images to train on, and plain Transformers to compare with."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from generation.images import Image, ImageProcessor
from tests.support import policy_checks as checks
from tests.support.row_advantages import advantage
from trainer.types import Sample

_MARKS = ("<|vision_start|>", "<|vision_end|>")


def noise(seed: int, width: int, height: int) -> Image:
    """Return an image of random pixels."""
    pixels = torch.randint(
        256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.read(Pillow.fromarray(pixels.numpy()))


def make_sample(
    processor: ImageProcessor, parts: list[int | Image], seed: int, sampled: int = 6
) -> Sample:
    """Return a sample of parts (a number of random tokens, or an image), then sampled tokens.

    The image placeholder's id is among the sampled tokens if there are more than 3.
    """
    generator = torch.Generator().manual_seed(seed)
    start, end, placeholder = processor.tokenizer.convert_tokens_to_ids([*_MARKS, "<|image_pad|>"])
    ids: list[int] = []
    images, spans = [], []
    for part in [*parts, sampled]:
        if isinstance(part, int):
            ids += torch.randint(14, 270, (part,), generator=generator).tolist()
        else:
            images.append(part)
            tokens = image_tokens(processor, part)
            spans.append((len(ids) + 1, len(tokens)))
            ids += [start, *tokens, end]
    if sampled > 3:
        ids[-3] = placeholder
    mask = [0] * (len(ids) - sampled) + [1] * sampled
    return Sample(ids, mask, [0.0] * len(ids), images=tuple(images), image_spans=tuple(spans))


def image_tokens(processor: ImageProcessor, image: Image) -> list[int]:
    """Return the tokens of an image from the processor's text for it: placeholders, with the ends of lines if there are."""
    text = processor._replacement(image.size)
    ids: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    first = ids.index(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    return ids[first : first + processor.tokens(image.size)]


def make_rows(processor: ImageProcessor) -> list[Sample]:
    """Rows with 0, 1 and 3 images of different sizes: first, last or alone in the prompt, or after the answer."""
    small, wide, high = noise(1, 28, 28), noise(2, 84, 28), noise(3, 56, 84)
    rows = [
        make_sample(processor, [5, wide, 3], 1),
        make_sample(processor, [9], 2),
        make_sample(processor, [small, 2, high, wide], 3),
        make_sample(processor, [high], 4, sampled=9),
        make_sample(processor, [2], 5, sampled=1),
    ]
    # An answer, then an image at the very end
    cut = make_sample(processor, [4, small, 3, wide], 6, sampled=0)
    start, size = cut.image_spans[1]
    answer = range(start - 4, start - 1)
    mask = [int(position in answer) for position in range(start + size)]
    kept = cut.input_ids[: start + size]
    rows.append(Sample(kept, mask, [0.0] * len(kept), images=cut.images, image_spans=cut.image_spans))
    return rows


def plain_forward(model: PreTrainedModel, processor: ImageProcessor, sample: Sample) -> Any:
    """Return the result of Transformers' own forward pass of one row, hidden states included."""
    ids = torch.tensor([sample.input_ids])
    seen = torch.zeros_like(ids, dtype=torch.bool)
    for start, count in sample.image_spans:
        seen[0, start : start + count] = True
    arguments: dict[str, Any] = dict(processor.features(sample.images)) if sample.images else {}
    if sample.images and hasattr(model.base_model, "get_rope_index"):
        arguments["mm_token_type_ids"] = seen.long()
    if "Gemma3" in type(model).__name__:
        arguments["token_type_ids"] = seen.long()
    if "Gemma4" in type(model).__name__:
        arguments["mm_token_type_ids"] = seen.long()
    # Where the placeholder's id was sampled, the model gets another id, and the hook embeds the true one.
    input_ids = ids.masked_fill(~seen & (ids == model.config.image_token_id), 5)
    hooks = [model.get_input_embeddings().register_forward_pre_hook(lambda *_: (ids,))]
    if (more := getattr(model.base_model, "get_per_layer_input_embeddings", None)) and (
        embedding := more()
    ) is not None:
        padded = ids.masked_fill(seen, model.config.text_config.pad_token_id)
        hooks.append(embedding.register_forward_pre_hook(lambda *_: (padded,)))
    try:
        return model(input_ids=input_ids, output_hidden_states=True, **arguments)
    finally:
        for hook in hooks:
            hook.remove()


def plain_outputs(
    model: PreTrainedModel, processor: ImageProcessor, sample: Sample, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of one row in plain Transformers, [T-1]; 0 where masked."""
    ids, logits = (
        torch.tensor([sample.input_ids]),
        plain_forward(model, processor, sample).logits[0, :-1] / temperature,
    )
    log_p, mask = torch.log_softmax(logits, dim=-1), torch.tensor(sample.loss_mask[1:])
    return log_p.gather(1, ids[0, 1:, None])[:, 0] * mask, -(log_p.exp() * log_p).sum(dim=-1) * mask


def plain_gradients(folder: Path, processor: ImageProcessor, samples: list[Sample]) -> dict[str, Tensor]:
    """Gradients of the loss of `policy_checks.make_loss`, in a loop over the rows."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    total = sum(sample.trainable for sample in samples)
    for sample in samples:
        logprobs, entropy = plain_outputs(model, processor, sample, checks.TEMPERATURE)
        ((-advantage(sample.input_ids) * logprobs - 0.1 * entropy).sum() / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
