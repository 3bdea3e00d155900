"""The whole picture in one tile, then its canvas cut into tiles; scale, normalize. Reference: transformers'
`LlavaNextImageProcessorPil`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..pixels import pixels_of
from ..tiles import Tiling
from .normal import normalized
from .resample import resampling

LARGEST = 1 << 15
"""Largest side of a canvas, in pixels."""


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [tiles, 3, side, side] of an RGB image: the whole one, its ratio not kept, then the tiles of
    its canvas in reading order, its ratio nearly kept between black margins."""
    tiling, filter_ = settings_of(settings), resampling(settings.resample)
    side, (high, wide) = tiling.side, tiling.canvas(image.height, image.width)
    down, across = high / image.height, wide / image.width
    if across < down:
        size = wide, min(math.ceil(image.height * across), high)
    else:
        size = min(math.ceil(image.width * down), wide), high
    canvas = np.zeros((high, wide, 3), np.uint8)
    left, top = (wide - size[0]) // 2, (high - size[1]) // 2
    canvas[top : top + size[1], left : left + size[0]] = pixels_of(image.resize(size, resample=filter_))
    tiles = canvas.reshape(high // side, side, wide // side, side, 3).transpose(0, 2, 1, 3, 4)
    whole = pixels_of(image.resize((side, side), resample=filter_))
    return np.concatenate([normalized(tile, settings) for tile in (whole, *tiles.reshape(-1, side, side, 3))])


def dimensions(settings: ImageInfo, most_rows: int) -> dict[str, tuple[int, int]]:
    """Tiles and embeddings of a picture, (usual, largest): one that is cut into tiles mostly fills as many as there can
    be."""
    most = settings_of(settings).most_tiles
    return {"tiles": (most, most), "rows": (most_rows, most_rows)}


def settings_of(settings: ImageInfo) -> Tiling:
    """The tiling of a manifest. Raises `BundleError` for settings that are none."""
    side, patch = settings.height, settings.extra.get("patch_size")
    canvases = settings.extra.get("image_grid_pinpoints")
    if (
        side is None
        or side != settings.width
        or type(patch) is not int
        or not 1 <= patch <= side
        or not isinstance(canvases, list)
        or not 1 <= len(canvases) <= 1024
        or not all(_is_canvas(each, side) for each in canvases)
    ):
        raise BundleError(
            "manifest fields image.height, image.width, image.patch_size, image.image_grid_pinpoints must be set for "
            f"processor {settings.processor!r}; build the bundle again"
        )
    return Tiling(side, side // patch, tuple((high, wide) for high, wide in canvases))


def _is_canvas(value: Any, side: int) -> bool:
    """Whether `value` is (height, width) in whole tiles."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(length) is int and 0 < length <= LARGEST and length % side == 0 for length in value)
    )
