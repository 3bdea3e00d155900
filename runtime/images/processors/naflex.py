"""Resize to whole units, or to whole tiles that are cut and the whole picture behind them; scale, normalize. Reference:
transformers' `Lfm2VlImageProcessor`, which needs torchvision: its steps are the same, its resampling of bytes is another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from ..naflex import Naflex
from ..pixels import pixels_of
from .resample import resampling

USUAL_UNITS = 256


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [1, 3, H, W] of the whole of an RGB image; `crops` gives its tiles, too."""
    return _normalized(
        _resized(image, settings_of(settings).whole(image.height, image.width), settings), settings
    )


def crops(image: Image.Image, settings: ImageInfo, naflex: Naflex) -> Iterator[np.ndarray]:
    """`pixel_values` float32 [1, 3, H, W] of each tile of an RGB image in reading order, then of the whole one; of one that is
    not cut, of that alone."""
    (down, across), side = naflex.grid(image.height, image.width), naflex.tile_size
    whole = naflex.whole(image.height, image.width)
    if (down, across) == (1, 1):
        yield _normalized(_resized(image, whole, settings), settings)
        return
    canvas = pixels_of(_resized(image, (down * side, across * side), settings))
    for tile in (
        canvas.reshape(down, side, across, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    ):
        yield _normalized(tile, settings)
    if naflex.thumbnail:
        yield _normalized(_resized(image, whole, settings), settings)


def patches_of(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """`pixel_values` float32 [1, 3, H, W] → patches [n, values] in reading order, a pixel's colours together."""
    _, colours, height, width = pixels.shape
    down, across = height // patch_size, width // patch_size
    split = pixels.reshape(colours, down, patch_size, across, patch_size)
    return np.ascontiguousarray(split.transpose(1, 3, 2, 4, 0)).reshape(down * across, -1)


def dimensions(settings: ImageInfo, most_rows: int) -> dict[str, tuple[int, int]]:
    """Units that the tower reads at once, (usual, largest)."""
    largest = settings_of(settings).largest_run
    return {"units": (min(USUAL_UNITS, largest), largest)}


def settings_of(settings: ImageInfo) -> Naflex:
    """What a manifest says of sizes. Raises `BundleError` for settings that are no such numbers."""
    extra = settings.extra
    names = (
        "patch_size", "merge_size", "tile_size", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens",
        "max_image_tokens", "max_pixels_tolerance",
    )  # fmt: skip
    values = [extra.get(name) for name in names]
    counts = [*values[:5], *values[6:8]]
    tolerance = values[8]
    if (
        not all(type(count) is int and 1 <= count <= 1 << 16 for count in counts)
        or type(values[5]) is not bool
        or not isinstance(tolerance, int | float)
        or not 0 < tolerance <= 1e6
        or values[3] > values[4]  # type: ignore[operator]
        or values[6] > values[7]  # type: ignore[operator]
        or values[4] > 1024  # type: ignore[operator]
        or values[2] % (values[0] * values[1])  # type: ignore[operator]
    ):
        raise BundleError(
            f"manifest fields image.{', image.'.join(names)} must be set for processor {settings.processor!r}; build the "
            "bundle again"
        )
    return Naflex(*values)  # type: ignore[arg-type]


def _resized(image: Image.Image, size: tuple[int, int], settings: ImageInfo) -> Image.Image:
    height, width = size
    return image.resize((width, height), resample=resampling(settings.resample))


def _normalized(image: Image.Image | np.ndarray, settings: ImageInfo) -> np.ndarray:
    """float32 [1, 3, H, W]. The reference takes the scale into mean and deviation, in float32."""
    pixels = image if isinstance(image, np.ndarray) else pixels_of(image)
    factor = np.float32(1.0 / settings.rescale_factor)
    mean, std = (np.asarray(each, np.float32) * factor for each in (settings.mean, settings.std))
    return np.ascontiguousarray(((pixels.astype(np.float32) - mean) / std).transpose(2, 0, 1)[None])
