"""How names of picture files end. No library is imported: Pillow has the same list, and a test compares them."""

from __future__ import annotations

from pathlib import PurePath

_OF_FORMATS = {
    "JPEG": ".jpg .jpeg .jpe .jfif", "PNG": ".png .apng", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif .tiff",
    "WEBP": ".webp", "AVIF": ".avif .avifs", "PPM": ".pbm .pgm .ppm .pnm .pfm",
    "JPEG2000": ".jp2 .j2k .jpc .jpf .jpx .j2c", "TGA": ".tga .icb .vda .vst", "ICO": ".ico",
}  # fmt: skip

FORMATS = tuple(_OF_FORMATS)
"""Formats that are read, as Pillow calls them. Others, such as EPS (it starts an interpreter), are refused."""

ENDINGS = frozenset(ending for endings in _OF_FORMATS.values() for ending in endings.split())
"""In small letters, with the dot."""


def is_picture(name: str | PurePath) -> bool:
    """Whether a file of this name is taken for a picture."""
    return PurePath(name).suffix.lower() in ENDINGS
