"""A picture for measurements and checks that are given none."""

from __future__ import annotations

import numpy as np


def synthetic_image(height: int, width: int) -> np.ndarray:
    """A uint8 image [H, W, 3] for measurements without a picture: smooth colour with three blocks."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([200 + 20 * x / width, 190 + 20 * y / height, 180 + 0 * x], axis=-1).astype(np.uint8)
    for index, colour in enumerate([(200, 40, 40), (40, 80, 200), (60, 160, 60)]):
        left = width * (1 + 3 * index) // 10
        picture[height // 3 : height * 2 // 3, left : left + width // 6] = colour
    return picture
