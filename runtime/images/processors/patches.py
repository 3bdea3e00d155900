"""Resize to whole units of patches near the picture's own size, scale, normalize. Reference: transformers'
`Qwen2VLImageProcessorPil`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError, ImageError
from ..pixels import pixels_of
from ..windows import Grid
from .normal import normalized
from .resample import resampling

USUAL_UNITS = 256
"""Rows of a picture of 448 × 448, whose windows mostly hold 16."""

SLIMMEST = 200
"""Largest ratio of a picture's sides."""


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, H, W] of an RGB image; H and W are whole units, and the ratio is nearly kept."""
    grid, least, most = settings_of(settings)
    return resized(image, fitted(image.height, image.width, grid.unit_size, least, most), settings)


def resized(image: Image.Image, size: tuple[int, int], settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, H, W] of an RGB image, `size` being (H, W)."""
    height, width = size
    pixels = image.resize((width, height), resample=resampling(settings.resample))
    return normalized(pixels_of(pixels), settings)


def dimensions(settings: ImageInfo, most_rows: int) -> dict[str, tuple[int, int]]:
    """Units and windows of a picture, (usual, largest); most windows has one as slim as it can be."""
    windows = -(-most_rows // settings_of(settings)[0].window_side)
    return {"units": (USUAL_UNITS, most_rows), "windows": (USUAL_UNITS // 16, windows)}


def settings_of(settings: ImageInfo) -> tuple[Grid, int, int]:
    """(grid, fewest pixels, most pixels). Raises `BundleError` for settings that are no such numbers."""
    names = ("patch_size", "merge_size", "temporal_patch_size", "window_size", "min_pixels", "max_pixels")
    values: list[Any] = [settings.extra.get(name) for name in names]
    if not all(type(value) is int and 1 <= value <= 1 << 32 for value in values) or values[4] > values[5]:
        raise BundleError(
            f"manifest fields {', '.join(f'image.{name}' for name in names)} must be set for processor "
            f"{settings.processor!r}; build the bundle again"
        )
    return Grid(*values[:4]), values[4], values[5]


def fitted(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in whole units whose pixels are in least..most, the ratio nearly kept; transformers'
    `smart_resize`. Raises `ImageError` for a picture that is slimmer than 1 : 200."""
    if max(height, width) > SLIMMEST * min(height, width):
        raise ImageError(
            f"a picture of {width} x {height} is slimmer than 1:{SLIMMEST}, the limit of this model"
        )
    down, across = round(height / unit) * unit, round(width / unit) * unit
    if down * across > most:
        shrink = math.sqrt(height * width / most)
        return (
            max(unit, math.floor(height / shrink / unit) * unit),
            max(unit, math.floor(width / shrink / unit) * unit),
        )
    if down * across < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return down, across
