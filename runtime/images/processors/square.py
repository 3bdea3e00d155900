"""Resize to a fixed size, scale, normalize; no crop. Reference: transformers' Pillow backend with those three steps
(`BlipImageProcessorPil`, `ViTImageProcessorPil`)."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...errors import BundleError
from .resample import resampling


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, height, width] of an RGB image; the aspect ratio is not kept."""
    if settings.width is None or settings.height is None:
        raise BundleError(
            f"manifest fields 'image.height' and 'image.width' must be set for processor {settings.processor!r}; "
            "build the bundle again"
        )
    resized = image.resize((settings.width, settings.height), resample=resampling(settings.resample))
    # The reference scales in float64, rounds to float32, then normalizes in float32.
    pixels = (np.asarray(resized).astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = np.asarray(settings.mean, np.float32), np.asarray(settings.std, np.float32)
    pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])  # [H, W, 3] → [1, 3, H, W]
