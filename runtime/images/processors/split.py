"""Resize to a longest side, then to whole tiles; cut, and the whole picture in one tile; scale, normalize. Reference:
transformers' `SmolVLMImageProcessorPil` and `Idefics3ImageProcessorPil`."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..pixels import pixels_of
from ..splits import LARGEST, Splitting
from .normal import normalized
from .resample import resampling


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [tiles, 3, side, side] of an RGB image: its tiles in reading order, then the whole one."""
    return split(image, settings, settings_of(settings))


def split(image: Image.Image, settings: ImageInfo, splitting: Splitting) -> np.ndarray:
    """As `preprocess`, cut as `splitting` says. Each size is made of the one before it: of what is resized twice, no pixel
    is what one step would make of it."""
    filter_, side = resampling(settings.resample), splitting.side
    for size_of in (splitting.resized, splitting.canvas):
        height, width = size_of(image.height, image.width)
        image = image.resize((width, height), resample=filter_)
    if (image.height, image.width) == (side, side):
        return normalized(pixels_of(image), settings)
    down, across = image.height // side, image.width // side
    tiles = pixels_of(image).reshape(down, side, across, side, 3).transpose(0, 2, 1, 3, 4)
    whole = pixels_of(image.resize((side, side), resample=filter_))
    return np.concatenate([normalized(tile, settings) for tile in (*tiles.reshape(-1, side, side, 3), whole)])


def settings_of(settings: ImageInfo) -> Splitting:
    """The splitting of a manifest. Raises `BundleError` for settings that are none."""
    side, longest = settings.height, settings.extra.get("longest_edge")
    tiled, tile_embeds = settings.extra.get("do_image_splitting"), settings.extra.get("tile_rows")
    if (
        side is None
        or side != settings.width
        or type(longest) is not int
        or not 1 <= longest <= 16 * LARGEST
        or type(tiled) is not bool
        or type(tile_embeds) is not int
        or not 1 <= tile_embeds <= side * side
    ):
        raise BundleError(
            "manifest fields image.height, image.width, image.longest_edge, image.do_image_splitting, image.tile_rows must "
            f"be set for processor {settings.processor!r}; build the bundle again"
        )
    return Splitting(side, longest, tiled, tile_embeds)
