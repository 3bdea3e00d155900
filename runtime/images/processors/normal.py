"""The last steps of every processor: scale and normalize."""

from __future__ import annotations

import numpy as np

from ...bundle.manifest import ImageInfo


def normalized(pixels: np.ndarray, settings: ImageInfo) -> np.ndarray:
    """uint8 [H, W, 3] → float32 [1, 3, H, W]. The reference scales in float64, rounds to float32, then normalizes in
    float32."""
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = np.asarray(settings.mean, np.float32), np.asarray(settings.std, np.float32)
    return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1)[None])
