"""Resize the shorter side, crop the middle, scale, normalize. Reference: transformers' `CLIPImageProcessorPil`."""

from __future__ import annotations

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..pixels import pixels_of
from .normal import normalized
from .resample import resampling
from .window import resized_window

THIN = 8
"""From this ratio on of a resized picture's longer side to what is kept of it, only that is made."""


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, height, width] of an RGB image; the aspect ratio is kept, what stands over is cut."""
    short = settings.extra.get("shortest_edge")
    if settings.width is None or settings.height is None or type(short) is not int or short < 1:
        raise BundleError(
            f"manifest fields 'image.height', 'image.width' and 'image.shortest_edge' must be set for processor "
            f"{settings.processor!r}; build the bundle again"
        )
    width, height = image.size
    longer = int(short * max(width, height) / min(width, height))
    size = (short, longer) if width <= height else (longer, short)
    resized = _resized(image, size, settings.height, settings.width, resampling(settings.resample))
    return normalized(_middle(resized, settings.height, settings.width), settings)


def _resized(
    image: Image.Image, size: tuple[int, int], height: int, width: int, resample: Resampling
) -> np.ndarray:
    """uint8 [H, W, 3] of an RGB image that is resized to `size` (width, height). Where that is much longer than the middle,
    and than the picture itself, only the middle of its longer side, so that a thin picture takes no more than its area."""
    axis = 0 if size[1] >= size[0] else 1
    longer, keep = size[1 - axis], (height, width)[axis]
    if longer <= max(THIN * keep, max(image.size)) or resample == Resampling.NEAREST:
        return pixels_of(image.resize(size, resample=resample))
    return resized_window(image, size, axis, (longer - keep) // 2, keep, resample)


def _middle(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle [height, width, 3]; black where the picture is smaller, as the reference pads it."""
    have = pixels.shape[:2]
    if have[0] < height or have[1] < width:
        # The reference pads first (the odd row goes in front), then cuts.
        whole = max(have[0], height), max(have[1], width)
        before = [-(-(a - b) // 2) for a, b in zip(whole, have, strict=True)]
        larger = np.zeros((*whole, 3), pixels.dtype)
        larger[before[0] : before[0] + have[0], before[1] : before[1] + have[1]] = pixels
        pixels = larger
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
