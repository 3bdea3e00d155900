"""Resize to a fixed size, scale, normalize; no crop. Reference: transformers' Pillow backend with those three steps
(`BlipImageProcessorPil`, `ViTImageProcessorPil`)."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..pixels import pixels_of
from .normal import normalized
from .resample import resampling


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, height, width] of an RGB image; the aspect ratio is not kept."""
    if settings.width is None or settings.height is None:
        raise BundleError(
            f"manifest fields 'image.height' and 'image.width' must be set for processor {settings.processor!r}; "
            "build the bundle again"
        )
    resized = image.resize((settings.width, settings.height), resample=resampling(settings.resample))
    return normalized(pixels_of(resized), settings)
