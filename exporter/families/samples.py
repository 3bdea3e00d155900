"""A picture and a sentence for every comparison that needs one."""

from __future__ import annotations

import numpy as np
from PIL import Image

SENTENCE = (
    "a small robot puts the red cube on the table next to the blue cup , then it looks at the green ball . "
)

ODD_SIZES = ((61, 83), (97, 45), (33, 33), (240, 317))
"""(height, width) of pictures that fit no vision tower: wide, tall, small and larger than most towers."""


def sample_picture(height: int, width: int) -> np.ndarray:
    """A uint8 [height, width, 3] picture of coloured boxes on a shaded ground."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([90 + 100 * y / height, 80 + 100 * x / width, np.full((height, width), 120.0)], -1)
    for k, color in enumerate([(200, 30, 30), (30, 60, 200), (40, 160, 60)]):
        top, left = height * (1 + k) // 5, width * (1 + 2 * k) // 8
        picture[top : top + height // 5, left : left + width // 5] = color
    return picture.astype(np.uint8)


def odd_picture(seed: int) -> Image.Image:
    """One of the pictures of `ODD_SIZES`."""
    return Image.fromarray(sample_picture(*ODD_SIZES[seed % len(ODD_SIZES)]))
