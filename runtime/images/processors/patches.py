"""Resize to whole units of patches near the picture's own size, scale, normalize. Reference: transformers'
`Qwen2VLImageProcessorPil`."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError, ImageError
from ..grid import Grid
from ..pixels import pixels_of
from ..windows import window_side
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
    """Units of a picture, and its windows where the tower has any, (usual, largest); most windows has one as slim as it can
    be."""
    sizes = {"units": (USUAL_UNITS, most_rows)}
    if "window_size" in settings.extra:
        side = window_side(positive(settings, "window_size"), settings_of(settings)[0])
        sizes["windows"] = (USUAL_UNITS // 16, -(-most_rows // side))
    return sizes


def settings_of(settings: ImageInfo) -> tuple[Grid, int, int]:
    """(grid, fewest pixels, most pixels). Raises `BundleError` for settings that are no such numbers."""
    names = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    patch_size, merge_size, temporal_patch_size, least, most = (positive(settings, name) for name in names)
    if least > most:
        raise _unset(settings, "min_pixels", "max_pixels")
    return Grid(patch_size, merge_size, temporal_patch_size), least, most


def positive(settings: ImageInfo, name: str) -> int:
    """A number of a processor's own settings that is at least 1. Raises `BundleError`."""
    value = settings.extra.get(name)
    if type(value) is not int or not 1 <= value <= 1 << 32:
        raise _unset(settings, name)
    return value


def _unset(settings: ImageInfo, *names: str) -> BundleError:
    return BundleError(
        f"manifest field {' and '.join(f'image.{name}' for name in names)} must be set for processor "
        f"{settings.processor!r}; build the bundle again"
    )


def fitted(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in whole units whose pixels are in least..most, the ratio nearly kept; transformers'
    `smart_resize`. Raises `ImageError` for a picture that is slimmer than 1 : 200."""
    check_ratio(height, width)
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


def check_ratio(height: int, width: int) -> None:
    """Raises `ImageError` for a picture that is slimmer than 1 : 200."""
    if max(height, width) > SLIMMEST * min(height, width):
        raise ImageError(
            f"a picture of {width} x {height} is slimmer than 1:{SLIMMEST}, the limit of this model"
        )
