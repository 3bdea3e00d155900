"""Settings of processors that cut pictures into grids of nearly their ratio, translated for the manifest."""

from __future__ import annotations

from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.processors.aspect_tiles import MOST_TILES
from ..common.images import described_processor, other_size


def aspect_tiled_image(
    settings: dict[str, Any],
    side: tuple[int, int],
    processor: str,
    reference: Any,
    most_pixels: int | None = None,
) -> dict[str, Any]:
    """Settings of a processor that cuts a picture into tiles of `side`, rescales and normalises; see `square_image`.

    A picture has between `min_patches` and `max_patches` tiles, as many as `most_pixels` hold at most.
    """
    refused = ("do_center_crop", "do_pad")
    described = described_processor(settings, side, processor, reference, refused=refused)
    size = settings.get("size") or reference.size
    if not isinstance(size, dict) or (size.get("height"), size.get("width")) != side:
        raise other_size(size, side)
    counts: dict[str, Any] = {}
    for name in ("min_patches", "max_patches"):
        counts[name] = settings[name] if settings.get(name) is not None else getattr(reference, name)
        if type(counts[name]) is not int or not 1 <= counts[name] <= MOST_TILES:
            raise UnsupportedModelError(
                f"image processor: {name}={counts[name]!r:.40} is not in 1..{MOST_TILES}"
            )
    if most_pixels is not None:
        counts["max_patches"] = min(counts["max_patches"], most_pixels // (side[0] * side[1]))
    if counts["min_patches"] > counts["max_patches"]:
        least = counts["min_patches"] * side[0] * side[1]
        raise UnsupportedModelError(
            "image processor: min_patches is above max_patches"
            if most_pixels is None
            else f"--max-pixels {most_pixels} is too small for this model, whose pictures have at least {least}"
        )
    return {**described, **counts}
