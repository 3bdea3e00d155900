"""Settings of processors that cut pictures into tiles, translated for the manifest."""

from __future__ import annotations

from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.processors.tiles import LARGEST
from ....runtime.images.tiles import Tiling
from ..common.images import described_processor, other_size


def tiled_image(settings: dict[str, Any], tiling: Tiling, processor: str, reference: Any) -> dict[str, Any]:
    """Settings of a processor that cuts a picture into tiles, rescales and normalises; see `square_image`.

    `tiling` is the model's: its processor must choose among the same canvases in the same order.
    """
    side = (tiling.side, tiling.side)
    described = described_processor(settings, side, processor, reference, refused=())
    for name, default in (("size", reference.size), ("crop_size", reference.crop_size)):
        size = settings.get(name) or default
        lengths = tuple(size.values()) if isinstance(size, dict) else (size,)
        if not lengths or any(length != tiling.side for length in lengths):
            raise other_size(size, side)
    canvases = canvas_list(
        settings.get("image_grid_pinpoints") or reference.image_grid_pinpoints, tiling.side, "image processor"
    )
    if canvases != tiling.canvases:
        raise UnsupportedModelError(
            "image processor: image_grid_pinpoints differ from the model's, "
            f"{[list(canvas) for canvas in tiling.canvases]!r:.200}"
        )
    return {**described, "image_grid_pinpoints": [list(canvas) for canvas in canvases]}


def canvas_list(value: Any, side: int, owner: str) -> tuple[tuple[int, int], ...]:
    """`image_grid_pinpoints` as (height, width) in whole tiles of `side` pixels; `owner` is named in errors."""
    canvases: list[tuple[int, int]] = []
    for each in value if isinstance(value, list | tuple) else [value]:
        lengths = tuple(each) if isinstance(each, list | tuple) else ()
        if len(lengths) != 2 or not all(
            type(n) is int and 0 < n <= LARGEST and n % side == 0 for n in lengths
        ):
            raise UnsupportedModelError(
                f"{owner}: {each!r:.80} in image_grid_pinpoints is not a height and a width in tiles of {side}"
            )
        canvases.append((lengths[0], lengths[1]))
    if not canvases:
        raise UnsupportedModelError(f"{owner}: image_grid_pinpoints is empty")
    return tuple(canvases)
