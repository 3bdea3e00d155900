"""Read an image from a path, bytes, a stream, a PIL image or an array, into upright 8-bit RGB, or refuse it by name.

| input | becomes |
|---|---|
| grey, palette, 1-bit, CMYK, YCbCr | converted to RGB |
| transparency (RGBA, LA, palette with a transparent colour, PNGs with one of any depth) | laid over white, as transformers' processors do; of 16-bit colour by the upper 8 bits |
| 16-bit grey (Pillow's modes `I;16` and `I`) | scaled, not clipped: the largest value of its range → 255 (see below) |
| 16-bit colour | its upper 8 bits, as Pillow reads it: 12-bit values in it come out dark, convert them before |
| EXIF orientation | applied: the picture stands as a viewer shows it |
| several frames (GIF, TIFF, MPO) | the first frame |
| array uint8 [H, W], [H, W, 1] | grey |
| array uint8 [H, W, 3] | RGB, or BGR with `channels="bgr"` (OpenCV) |

Cameras of 10, 12 or 14 bits write their values unscaled into 16, which would come out nearly black. The range of a 16-bit
grey picture is therefore 0 to: 65535 for PGM and JPEG 2000 (their header names the range, Pillow has scaled to it);
MaxSampleValue for a TIFF that has this tag; else the smallest of 255, 1023, 4095, 16383 and 65535 that no value of the
picture exceeds. The last can change from frame to frame of a dark film: convert such frames yourself, `(x >> 4).astype("uint8")`.
"""

from __future__ import annotations

import io
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..common.errors import ImageError
from ..common.foreign_errors import from_signal_handler, raise_if_foreign
from ..common.paths import look_at, path_text
from ..common.validation import check_colour_order
from .endings import FORMATS as FORMATS
from .pixels import pixels_of
from .remote import check_local
from .video_input import Video

MAX_PIXELS = 80_000_000
"""Larger images are refused before they are decoded (240 MB as RGB): a small file can claim any size."""

MOST_BYTES = 256 << 20
"""More than the largest picture takes uncompressed. More encoded bytes than this are refused."""


def load_image(source: Any, channels: str = "rgb", name: str = "the image") -> Image.Image:
    """An upright PIL image in mode RGB.

    `source` is a path, the bytes of an image file or a binary stream of them, a PIL image of any mode in the table above,
    or a uint8 array [H, W, 3], [H, W] or [H, W, 1]. `channels` is the order of an array's colours: "rgb" or "bgr".
    `name` stands in messages for what has no path.
    Raises `ImageError` naming the source and what is wrong with it.
    """
    check_colour_order("channels", channels, ImageError)
    if isinstance(source, np.ndarray):
        return _from_array(source, channels)
    if channels != "rgb":
        raise ImageError(
            f"channels: {channels!r} is for arrays, whose order nobody else knows; leave it out for {_kind(source)}"
        )
    if isinstance(source, Image.Image):
        return _to_rgb(source, name)
    check_local(source)
    if isinstance(source, str | os.PathLike):
        path, kind = look_at(source, ImageError, name)
        if kind != "file":
            there = "no such image file" if kind == "nothing" else "is not a file"
            raise ImageError(f"{path_text(path)}: {there}")
        with opened(path, path_text(path)) as image:
            return _to_rgb(image, path_text(path))
    if isinstance(source, bytes | bytearray | memoryview):
        with opened(_encoded(bytes(source), name), name) as image:
            return _to_rgb(image, name)
    if callable(getattr(source, "read", None)):
        with opened(_encoded(_read(source, name), name), name) as image:
            return _to_rgb(image, name)
    if isinstance(source, Video):
        raise ImageError("this model reads pictures, not Video; give it some of the frames as images")
    raise ImageError(
        "an image is a path, bytes or a binary stream of an image file, a PIL image or a uint8 array [H, W, 3], not "
        f"{_kind(source)}"
    )


def check_picture(path: Path) -> None:
    """Raises `ImageError` where a file's header is not that of a picture which is read; its pixels are not looked at."""
    with opened(path, str(path)) as image:
        _check_size(image.width, image.height, str(path))


def _kind(source: Any) -> str:
    return "a path" if isinstance(source, str | os.PathLike) else type(source).__name__


def _read(stream: Any, name: str) -> bytes:
    """All of a stream, and a little more than what is accepted at most."""
    try:
        data = stream.read(MOST_BYTES + 1)
    except Exception as error:  # closed, not readable, …: each kind of stream raises its own
        if from_signal_handler(error):
            raise
        raise ImageError(f"{name}: cannot be read ({reason(error)})") from error
    if not isinstance(data, bytes):
        raise ImageError(
            f"{name}: the stream gives {type(data).__name__}, not bytes; open the file in mode 'rb'"
        )
    return data


def _encoded(data: bytes, name: str) -> io.BytesIO:
    if not data:
        raise ImageError(f"{name}: is empty (0 bytes)")
    if len(data) > MOST_BYTES:
        raise ImageError(f"{name}: more than {MOST_BYTES >> 20} MiB; scale it down")
    return io.BytesIO(data)


def opened(source: Path | io.BytesIO, name: str) -> Image.Image:
    """A picture of a known format, whose pixels are not read yet. Raises `ImageError`."""
    try:
        if isinstance(source, Path) and source.stat().st_size == 0:
            raise ImageError(f"{name}: the image file is empty (0 bytes)")
        with warnings.catch_warnings():
            # Pillow warns about large images before our own limit can refuse them, and about odd metadata.
            warnings.simplefilter("ignore")
            return Image.open(source, formats=_formats())
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{name}: more than {MAX_PIXELS // 1_000_000} megapixels; scale it down") from None
    except ImageError:
        raise
    except Exception as error:  # decoders fail in many ways on damaged headers
        raise_if_foreign(error)
        raise ImageError(f"{name}: cannot be read ({reason(error)})") from error


@cache
def _formats() -> tuple[str, ...]:
    Image.init()  # Pillow can be built without AVIF, WEBP or JPEG2000
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    _check_size(*image.size, name)
    declared, transparent = _declared_range(image), _transparent(image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's notes on odd metadata: the picture itself is good
            image.load()
            if transparent is not None:
                image.info["transparency"] = transparent
            image = _upright(image)
    except Exception as error:  # truncated or damaged data: each decoder raises its own kind
        raise_if_foreign(error)
        raise ImageError(f"{name}: the image data is truncated or damaged ({reason(error)})") from error
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I"):
        return _from_16_bit(image, name, declared)
    try:
        if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            background = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(background, image)
        elif image.mode == "F":
            raise ValueError("floating-point pixels have no fixed range")
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise_if_foreign(error)
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
    except Exception as error:  # EXIF that cannot be read counts as none: the pixels are good
        raise_if_foreign(error)
        return image


def _transparent(image: Image.Image) -> Any:
    """The transparent value of an image that is not read yet, None where it has none, as its pixels will be: Pillow
    stretches grey of 2 and 4 bits and cuts colours of 16, and leaves the value that a PNG writes."""
    value, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    depth = tiles[0][3] if tiles and image.format == "PNG" else None
    if isinstance(value, int) and depth in ("L;2", "L;4"):
        return value * (85 if depth == "L;2" else 17)
    if isinstance(value, tuple) and depth == "RGB;16B":
        return tuple(part >> 8 for part in value)
    return value


RANGES = (255, 1023, 4095, 16383, 65535)
"""Largest values of the depths that cameras have."""


def _declared_range(image: Image.Image) -> int | None:
    """The largest value that the file says its grey values can have, None where it says nothing."""
    if image.format in ("PPM", "JPEG2000"):
        return RANGES[-1]
    try:
        value = image.tag_v2.get(281) if image.format == "TIFF" else None  # type: ignore[attr-defined]
        value = value[0] if isinstance(value, tuple) else value
        return int(value) if value and value <= RANGES[-1] else None
    except Exception as error:  # a tag that cannot be read counts as none
        raise_if_foreign(error)
        return None


def _from_16_bit(image: Image.Image, name: str, declared: int | None) -> Image.Image:
    pixels = pixels_of(image.convert("I"))  # int32, whatever the byte order in the file
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise ImageError(
            f"{name}: grey values {low}..{high} are outside 16 bits; save it as 8-bit PNG or JPEG"
        )
    transparent = image.info.get("transparency")
    white = np.equal(pixels, transparent if isinstance(transparent, int) else -1)
    high = int(pixels.max(initial=0, where=~white))
    full = next(value for value in (declared or 0, *RANGES) if value >= max(high, 1))
    grey = ((pixels.astype(np.uint32) * 255 + full // 2) // full).astype(np.uint8)
    grey[white] = 255
    return Image.fromarray(grey).convert("RGB")


def _from_array(array: np.ndarray, channels: str) -> Image.Image:
    if isinstance(array, np.ma.MaskedArray):
        raise ImageError(
            "a masked array says nothing of what is masked; fill it first, array.filled(0) for black"
        )
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)):
        raise ImageError(
            f"an image array is uint8 [H, W, 3], or [H, W] for grey, not {array.dtype} {list(array.shape)}; "
            "convert it first, e.g. (x * 255).round().astype('uint8'), or x[..., :3] to leave out transparency"
        )
    if not array.size:
        raise ImageError(f"the image array has no pixels: {list(array.shape)}")
    # Before a broadcast view becomes real memory.
    _check_size(array.shape[1], array.shape[0], "the image array")
    if grey:
        array = array.reshape(array.shape[:2])
    elif channels == "bgr":
        array = array[:, :, ::-1]
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), "the image array")


def reason(error: Exception) -> str:
    """What a library says, in one line."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
