"""Image processor settings, translated for the manifest; what the runtime cannot do is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.processors.tiles import LARGEST
from ....runtime.images.tiles import Tiling
from ....runtime.images.windows import Grid

RESAMPLE = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # PIL.Image.Resampling


def square_image(
    settings: dict[str, Any], side: tuple[int, int], processor: str, reference: Any
) -> dict[str, Any]:
    """Settings of a processor that resizes every image to one size, rescales and normalises.

    `side` is (height, width) that the vision tower takes, `processor` the runtime's name for it, and `reference` the
    transformers class on Pillow whose own values stand for settings that are left out.
    """
    described = _described(settings, side, processor, reference, refused=("do_center_crop", "do_pad"))
    size = settings.get("size") or reference.size
    sides = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if sides != side:
        raise _other_size(size, side)
    return described


def cropped_image(
    settings: dict[str, Any], side: tuple[int, int], processor: str, reference: Any
) -> dict[str, Any]:
    """Settings of a processor that resizes the shorter side, crops the middle, rescales and normalises; see
    `square_image`."""
    if settings.get("do_center_crop") is False:
        raise UnsupportedModelError("image processor: do_center_crop=false is not supported")
    described = _described(settings, side, processor, reference, refused=("do_pad",))
    crop = settings.get("crop_size") or reference.crop_size
    sides = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    if sides != side:
        raise _other_size(crop, side)
    size = settings.get("size") or reference.size
    short = size.get("shortest_edge") if isinstance(size, dict) else size
    if type(short) is not int or short < 1 or (isinstance(size, dict) and len(size) > 1):
        raise UnsupportedModelError(f"image processor: size {size} is not a shortest_edge")
    return {**described, "shortest_edge": short}


def patched_image(
    settings: dict[str, Any], grid: Grid, processor: str, reference: Any, most_pixels: int | None = None
) -> dict[str, Any]:
    """Settings of a processor that resizes to whole units of patches, rescales and normalises; see `square_image`.

    `grid` is the tower's. Pictures keep between `min_pixels` and `max_pixels`, which `most_pixels` lowers.
    """
    described = _described(settings, None, processor, reference, refused=())
    values: dict[str, Any] = {}
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        values[name] = settings.get(name, getattr(reference, name))
        if values[name] != getattr(grid, name):
            raise UnsupportedModelError(
                f"image processor: {name}={values[name]!r:.40} differs from the vision tower's {getattr(grid, name)}"
            )
    given = settings.get("size") or {}
    if not isinstance(given, dict):
        raise UnsupportedModelError(
            f"image processor: size {given!r:.40} is no object of shortest_edge and longest_edge, in pixels"
        )
    size = {**reference.size, **given}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        asked = settings.get(name)
        values[name] = size.get(edge) if asked is None else asked
    if most_pixels is not None and type(values["max_pixels"]) is int:
        values["max_pixels"] = min(most_pixels, values["max_pixels"])
    least, most = values["min_pixels"], values["max_pixels"]
    if type(least) is not int or type(most) is not int or not 1 <= least <= most or most < grid.unit_pixels:
        raise UnsupportedModelError(
            f"image processor: {least!r:.40} to {most!r:.40} pixels are no sizes of pictures"
            + ("" if most_pixels is None else f"; --max-pixels {most_pixels} is too small for this model")
        )
    return {**described, **values}


def sampled_video(
    settings: dict[str, Any],
    image: dict[str, Any],
    token_id: int,
    tokens_per_second: float,
    most_pixels: int | None = None,
) -> dict[str, Any]:
    """Settings of a processor that samples frames and reads them as `image` (see `patched_image`) says.

    `most_pixels` lowers the bounds of a frame. `settings` are the video processor's; {} for a folder without any, whose
    authors read videos by the defaults here (qwen-vl-utils; transformers' `Qwen2VLVideoProcessor`), not by the pictures'
    bounds.
    Raises UnsupportedModelError where frames are not read as pictures are.
    """
    alike = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "merge_size",
    }
    alike |= {"image_mean": "mean", "image_std": "std", "rescale_factor": "rescale_factor"}
    for name, known in alike.items():
        if name in settings and settings[name] != image[known]:
            raise UnsupportedModelError(
                f"video processor: {name}={settings[name]!r:.80} differs from the image processor's {image[known]}"
            )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(name) is False:
            raise UnsupportedModelError(f"video processor: {name}=false is not supported")
    if "resample" in settings and RESAMPLE.get(settings["resample"]) != image["resample"]:
        raise UnsupportedModelError(
            f"video processor: resample={settings['resample']!r:.40} differs from the image processor's "
            f"{image['resample']}"
        )
    size, unit = settings.get("size") or {}, (image["patch_size"] * image["merge_size"]) ** 2
    asked = lambda name, default: default if settings.get(name) is None else settings[name]  # noqa: E731
    pixels = {
        "min_pixels": asked("min_pixels", size.get("shortest_edge", 128 * unit)),
        "max_pixels": asked("max_pixels", size.get("longest_edge", 768 * unit)),
    }
    if most_pixels is not None:
        pixels = {name: min(most_pixels, value) for name, value in pixels.items()}
    return {
        "token_id": token_id,
        "fps": asked("fps", 2.0),
        "min_frames": asked("min_frames", 4),
        "max_frames": asked("max_frames", 768),
        **pixels,
        "max_rows": int(asked("max_video_tokens", 128_000) * 0.9),
        "tokens_per_second": tokens_per_second,
    }


def tiled_image(settings: dict[str, Any], tiling: Tiling, processor: str, reference: Any) -> dict[str, Any]:
    """Settings of a processor that cuts a picture into tiles, rescales and normalises; see `square_image`.

    `tiling` is the model's: its processor must choose among the same canvases in the same order.
    """
    side = (tiling.side, tiling.side)
    described = _described(settings, side, processor, reference, refused=())
    for name, default in (("size", reference.size), ("crop_size", reference.crop_size)):
        size = settings.get(name) or default
        lengths = tuple(size.values()) if isinstance(size, dict) else (size,)
        if not lengths or any(length != tiling.side for length in lengths):
            raise _other_size(size, side)
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


def _other_size(size: Any, side: tuple[int, int]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"image processor: size {size} differs from the vision tower's {side[0]} x {side[1]}"
    )


def _described(
    settings: dict[str, Any],
    side: tuple[int, int] | None,
    processor: str,
    reference: Any,
    refused: Sequence[str],
) -> dict[str, Any]:
    for name in refused:
        if settings.get(name):
            raise UnsupportedModelError(f"image processor: {name}=true is not supported")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(name) is False:
            raise UnsupportedModelError(f"image processor: {name}=false is not supported")
    resample = settings.get("resample", int(reference.resample))
    if type(resample) is not int or resample not in RESAMPLE:
        raise UnsupportedModelError(f"image processor: resample={resample!r} is unknown")
    mean = _channels(settings, "image_mean", reference.image_mean)
    std = _channels(settings, "image_std", reference.image_std)
    return {
        "processor": processor,
        "height": side and side[0],
        "width": side and side[1],
        "resample": RESAMPLE[resample],
        "rescale_factor": settings.get("rescale_factor", 1 / 255),
        "mean": mean,
        "std": std,
        "reference": reference.__name__,
    }


def _channels(settings: dict[str, Any], name: str, default: Sequence[float]) -> list[float]:
    values = settings.get(name) or default
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_number, values)):
        raise UnsupportedModelError(f"image processor: {name}={values!r:.80} is not three numbers")
    return list(values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
