"""Images of noise, equal in every run."""

from pathlib import Path

import numpy as np
import PIL.Image
from transformers import AutoTokenizer

from generation.images import Image, ImageLimits, ImageProcessor, ImageRules


def picture(width: int, height: int) -> PIL.Image.Image:
    """RGB noise that depends on the width alone."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def images(*sizes: tuple[int, int]) -> tuple[Image, ...]:
    """Encode a picture of each size."""
    return tuple(Image.read(picture(*size)) for size in sizes)


def image_rules(model: Path, **rules: int) -> ImageRules:
    """Return the rules of a model's images, of at most 20,000 pixels."""
    processor = ImageProcessor(model, AutoTokenizer.from_pretrained(model))
    return ImageRules(processor, ImageLimits(max_pixels=20_000), **rules)
