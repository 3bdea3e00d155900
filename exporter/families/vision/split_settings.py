"""Settings of processors that cut a picture into the tiles that it fills, and of frames of a video in one tile each,
translated for the manifest."""

from __future__ import annotations

import math
from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.splits import LARGEST, Splitting
from ..common.images import RESAMPLE, described_processor, other_size


def split_image(
    settings: dict[str, Any], side: int, tile_embeds: int, reference: Any, most_pixels: int | None = None
) -> dict[str, Any]:
    """Settings of a processor that resizes to a longest side and cuts into tiles of `side` pixels; see `square_image`.

    `most_pixels` lowers the longest side to so many whole tiles that a square of them has no more pixels; from one tile on
    a picture is not cut. Raises UnsupportedModelError where less than one tile is left.
    """
    described = described_processor(settings, (side, side), "idefics3", reference, refused=())
    if _longest_edge(settings, "max_image_size", reference) != side:
        raise other_size(settings.get("max_image_size") or reference.max_image_size, (side, side))
    longest = _longest_edge(settings, "size", reference)
    if most_pixels is not None:
        tiles = math.isqrt(most_pixels) // side
        if tiles < 1:
            raise UnsupportedModelError(
                f"image processor: --max-pixels {most_pixels} is too small for this model, whose tiles have {side * side}"
            )
        longest = min(
            longest, tiles * side - tiles * side % 2
        )  # the shorter side may become one pixel longer
    tiled = settings.get("do_image_splitting")
    return {
        **described,
        "longest_edge": longest,
        "do_image_splitting": reference.do_image_splitting if tiled is None else bool(tiled),
        "tile_rows": tile_embeds,
    }


def splitting_of(described: dict[str, Any]) -> Splitting:
    """What the manifest's `image` says of tiles."""
    return Splitting(
        described["height"],
        described["longest_edge"],
        described["do_image_splitting"],
        described["tile_rows"],
    )


def frames_in_tiles(settings: dict[str, Any], image: dict[str, Any], token_id: int) -> dict[str, Any] | None:
    """The manifest's `image.video`: frames that are read as pictures of one tile are (`image`, see `split_image`); None for
    settings without `video_sampling`, of a model that reads no videos.

    `token_id` stands for a row. As in `SmolVLMVideoProcessor`, a `size` takes the place of `video_sampling.video_size`.
    """
    sampling = settings.get("video_sampling")
    if sampling is None:
        return None
    if not isinstance(sampling, dict) or not _counts(sampling.get("max_frames"), sampling.get("fps")):
        raise UnsupportedModelError(
            f"video processor: video_sampling={sampling!r:.80} has no max_frames and fps of its frames"
        )
    for name, known in (("image_mean", "mean"), ("image_std", "std"), ("rescale_factor", "rescale_factor")):
        if name in settings and settings[name] is not None and settings[name] != image[known]:
            raise UnsupportedModelError(
                f"video processor: {name}={settings[name]!r:.80} differs from the image processor's {image[known]}"
            )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(name) is False:
            raise UnsupportedModelError(f"video processor: {name}=false is not supported")
    if RESAMPLE.get(settings.get("resample", 1)) != image["resample"]:
        raise UnsupportedModelError(
            f"video processor: resample={settings['resample']!r:.40} differs from the image processor's "
            f"{image['resample']}"
        )
    side = image["height"]
    tile = settings.get("max_image_size") or {}
    if not isinstance(tile, dict) or tile.get("longest_edge") != side:
        raise UnsupportedModelError(
            f"video processor: max_image_size {tile!r:.80} differs from the vision tower's {side}"
        )
    size = settings.get("size") or sampling.get("video_size")
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    if type(longest) is not int or not 1 <= longest <= 16 * LARGEST:
        raise UnsupportedModelError(f"video processor: size {size!r:.80} is not a longest_edge")
    return {
        "token_id": token_id,
        "fps": float(sampling["fps"]),
        "min_frames": 1,
        "max_frames": sampling["max_frames"],
        "min_pixels": side * side,
        "max_pixels": side * side,
        "max_rows": sampling["max_frames"] * image["tile_rows"],
        "tokens_per_second": 0.0,
        "longest_edge": longest,
    }


def _longest_edge(settings: dict[str, Any], name: str, reference: Any) -> int:
    size = settings.get(name) or getattr(reference, name)
    longest = size.get("longest_edge") if isinstance(size, dict) and len(size) == 1 else None
    if type(longest) is not int or not 1 <= longest <= 16 * LARGEST:
        raise UnsupportedModelError(f"image processor: {name} {size!r:.80} is not a longest_edge")
    return longest


def _counts(frames: Any, fps: Any) -> bool:
    return type(frames) is int and frames > 0 and type(fps) in (int, float) and fps > 0
