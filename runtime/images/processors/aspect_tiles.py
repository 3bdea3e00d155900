"""Stretch to a grid of tiles, cut, and put the whole picture behind them; scale, normalize. Reference: transformers'
`GotOcr2ImageProcessorPil`, with `crop_to_patches` as InternVL's processor asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..aspect_tiles import AspectTiling
from ..pixels import pixels_of
from .normal import normalized
from .resample import resampling

MOST_TILES = 64
"""Of a grid. Published models have 12."""


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [tiles, 3, side, side] of an RGB image: the tiles of its grid in reading order, then, behind
    several, the whole one."""
    (tiling, _), filter_ = settings_of(settings), resampling(settings.resample)
    side, (rows, columns) = tiling.side, tiling.grid(image.height, image.width)
    resized = pixels_of(image.resize((columns * side, rows * side), resample=filter_))
    cut = resized.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    tiles = list(cut)
    if len(tiles) > 1:
        tiles.append(pixels_of(image.resize((side, side), resample=filter_)))
    return np.concatenate([normalized(tile, settings) for tile in tiles])


def dimensions(settings: ImageInfo, most_rows: int) -> dict[str, tuple[int, int]]:
    """Tiles of a picture, (usual, largest): one whose ratio is 4 to 3 has as many as there can be."""
    most = settings_of(settings)[0].most_tiles
    return {"tiles": (most, most)}


def settings_of(settings: ImageInfo) -> tuple[AspectTiling, int]:
    """The tiling of a manifest, and how many embeddings a tile becomes. Raises `BundleError` for settings that are
    none."""
    names = ("min_patches", "max_patches", "image_seq_length")
    least, most, each = (settings.extra.get(name) for name in names)
    side = settings.height
    if (
        side is None
        or side != settings.width
        or not _is_count(least, MOST_TILES)
        or not _is_count(most, MOST_TILES)
        or not _is_count(each, 1 << 20)
        or least > most  # type: ignore[operator]
    ):
        raise BundleError(
            f"manifest fields image.height, image.width, {', '.join(f'image.{name}' for name in names)} must be set for "
            f"processor {settings.processor!r}; build the bundle again"
        )
    return AspectTiling(side, least, most), each  # type: ignore[arg-type,return-value]


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most
