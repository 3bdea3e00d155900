"""The pixels of a picture as an array."""

from __future__ import annotations

import numpy as np
from PIL import Image


def pixels_of(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3] of an RGB picture, int32 [H, W] of one of mode "I"; read-only.

    Not `np.asarray(image)`, which gives the same: NumPy drops an AttributeError that a signal handler raises meanwhile.
    """
    height, width = image.height, image.width
    if image.mode == "I":
        return np.frombuffer(image.tobytes(), np.int32).reshape(height, width)
    return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, len(image.getbands()))
