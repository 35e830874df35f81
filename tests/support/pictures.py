"""Images of noise, equal in every run."""

import numpy as np
import PIL.Image

from generation.images import Image


def picture(width: int, height: int) -> PIL.Image.Image:
    """RGB noise that depends on the width alone."""
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def images(*sizes: tuple[int, int]) -> tuple[Image, ...]:
    """Encode a picture of each size."""
    return tuple(Image.read(picture(*size)) for size in sizes)
