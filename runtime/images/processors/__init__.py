"""Image processors: upright RGB → `pixel_values`, equal to transformers' PIL backend. One file per processor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from ...bundle.manifest import ImageInfo
from ...common.errors import BundleError
from . import aspect_tiles, crop, naflex, patches, split, square, tiles

PROCESSORS: dict[str, Callable[[Image.Image, ImageInfo], np.ndarray]] = {
    "blip": square.preprocess,
    "clip": crop.preprocess,
    "gemma3": square.preprocess,
    "got-ocr2": aspect_tiles.preprocess,
    "idefics3": split.preprocess,
    "lfm2-vl": naflex.preprocess,
    "llava-next": tiles.preprocess,
    "qwen2-vl": patches.preprocess,
    "siglip": square.preprocess,
    "vit": square.preprocess,
}
"""`image.processor` of a manifest → function. A new processor is one line here."""

DIMENSIONS: dict[str, Callable[[ImageInfo, int], dict[str, tuple[int, int]]]] = {
    "got-ocr2": aspect_tiles.dimensions,
    "lfm2-vl": naflex.dimensions,
    "llava-next": tiles.dimensions,
    "qwen2-vl": patches.dimensions,
}
"""The same for those whose pictures differ in size: (settings, most embeddings of a picture) → symbolic dimension of
the graph `vision` → (usual, largest)."""


def dimensions(settings: ImageInfo | None, most_rows: int) -> dict[str, tuple[int, int]]:
    """Symbolic dimensions of the graph `vision` beside its batch → (usual, largest); none for a tower of one size."""
    sizes_of = None if settings is None else DIMENSIONS.get(settings.processor)
    return {} if settings is None or sizes_of is None else sizes_of(settings, most_rows)


def preprocess(image: Image.Image, settings: ImageInfo) -> np.ndarray:
    """`pixel_values` float32 [n, 3, H, W] of an RGB image, by the processor that the manifest names; n is 1 but for a
    picture that is cut into tiles."""
    if settings.processor not in PROCESSORS:
        known = ", ".join(sorted(PROCESSORS))
        raise BundleError(
            f"manifest field 'image.processor': {settings.processor!r} is unknown to this version, which knows "
            f"{known}; upgrade with `pip install --upgrade vlmexport`"
        )
    return PROCESSORS[settings.processor](image, settings)
