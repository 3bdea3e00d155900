"""Read an image from a path, a PIL image or an array, into upright 8-bit RGB, or refuse it by name.

| input | becomes |
|---|---|
| grey, palette, 1-bit, CMYK, YCbCr | converted to RGB |
| transparency (RGBA, LA, palette with a transparent colour) | laid over white, as transformers' processors do |
| 16-bit grey | 65535 → 255 (scaled, not clipped); Pillow reads 16-bit colour as its upper 8 bits |
| EXIF orientation | applied: the picture stands as a viewer shows it |
| several frames (GIF, TIFF, MPO) | the first frame |
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import ImageError

MAX_PIXELS = 80_000_000
"""Larger images are refused before they are decoded (240 MB as RGB): a small file can claim any size."""

FORMATS = (
    "JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "AVIF", "PPM", "JPEG2000", "TGA", "ICO",
)  # fmt: skip
"""Formats that are read. Others, such as EPS (it starts an interpreter), are refused."""


def load_image(source: Any) -> Image.Image:
    """An upright PIL image in mode RGB.

    `source` is a path, a PIL image of any mode in the table above, or a uint8 array [H, W, 3] in RGB order.
    Raises `ImageError` naming the source and what is wrong with it.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return _to_rgb(source, "the image")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        with _open(path) as image:
            return _to_rgb(image, str(path))
    raise ImageError(
        f"an image is a path, a PIL image or a uint8 array [H, W, 3], not {type(source).__name__}"
    )


def _open(path: Path) -> Image.Image:
    try:
        if not path.is_file():
            raise ImageError(f"{path}: {'is not a file' if path.exists() else 'no such image file'}")
        if path.stat().st_size == 0:
            raise ImageError(f"{path}: the image file is empty (0 bytes)")
        with warnings.catch_warnings():
            # Pillow warns about large images before our own limit can refuse them, and about odd metadata.
            warnings.simplefilter("ignore")
            return Image.open(path, formats=_formats())
    except UnidentifiedImageError:
        raise ImageError(f"{path}: not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{path}: more than {MAX_PIXELS // 1_000_000} megapixels; scale it down") from None
    except ImageError:
        raise
    except Exception as error:  # decoders fail in many ways on damaged headers
        raise ImageError(f"{path}: cannot be read ({_reason(error)})") from error


@cache
def _formats() -> tuple[str, ...]:
    Image.init()  # Pillow can be built without AVIF, WEBP or JPEG2000
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    _check_size(*image.size, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's notes on odd metadata: the picture itself is good
            image.load()
            image = _upright(image)
    except Exception as error:  # truncated or damaged data: each decoder raises its own kind
        raise ImageError(f"{name}: the image data is truncated or damaged ({_reason(error)})") from error
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I"):
        return _from_16_bit(image, name)
    try:
        if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            background = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(background, image)
        elif image.mode == "F":
            raise ValueError("floating-point pixels have no fixed range")
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise ImageError(
            f"{name}: mode {image.mode!r} cannot become RGB ({error}); save it as 8-bit PNG or JPEG"
        ) from error


def _check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{name}: has no pixels ({width} × {height})")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{name}: {width} × {height} pixels; the limit is {MAX_PIXELS // 1_000_000} megapixels; scale it down"
        )


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image) or image
    except Exception:  # EXIF that cannot be read counts as none: the pixels are good
        return image


def _from_16_bit(image: Image.Image, name: str) -> Image.Image:
    pixels = np.asarray(image.convert("I"))  # int32, whatever the byte order in the file
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise ImageError(
            f"{name}: grey values {low}..{high} are outside 16 bits; save it as 8-bit PNG or JPEG"
        )
    grey = ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ImageError(
            f"an image array is uint8 [H, W, 3] in RGB order, not {array.dtype} {list(array.shape)}; "
            "convert it first, e.g. (x * 255).round().astype('uint8')"
        )
    if not array.size:
        raise ImageError(f"the image array has no pixels: {list(array.shape)}")
    _check_size(
        array.shape[1], array.shape[0], "the image array"
    )  # before a broadcast view becomes real memory
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), "the image array")


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
