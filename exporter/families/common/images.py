"""Image processor settings, translated for the manifest; what the runtime cannot do is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....runtime.common.errors import UnsupportedModelError

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
    described = described_processor(
        settings, side, processor, reference, refused=("do_center_crop", "do_pad")
    )
    size = settings.get("size") or reference.size
    sides = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if sides != side:
        raise other_size(size, side)
    return described


def cropped_image(
    settings: dict[str, Any], side: tuple[int, int], processor: str, reference: Any
) -> dict[str, Any]:
    """Settings of a processor that resizes the shorter side, crops the middle, rescales and normalises; see
    `square_image`."""
    if settings.get("do_center_crop") is False:
        raise UnsupportedModelError("image processor: do_center_crop=false is not supported")
    described = described_processor(settings, side, processor, reference, refused=("do_pad",))
    crop = settings.get("crop_size") or reference.crop_size
    sides = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    if sides != side:
        raise other_size(crop, side)
    size = settings.get("size") or reference.size
    short = size.get("shortest_edge") if isinstance(size, dict) else size
    if type(short) is not int or short < 1 or (isinstance(size, dict) and len(size) > 1):
        raise UnsupportedModelError(f"image processor: size {size} is not a shortest_edge")
    return {**described, "shortest_edge": short}


def other_size(size: Any, side: tuple[int, int]) -> UnsupportedModelError:
    """The error for a processor that makes pictures of another size than the tower takes."""
    return UnsupportedModelError(
        f"image processor: size {size} differs from the vision tower's {side[0]} x {side[1]}"
    )


def described_processor(
    settings: dict[str, Any],
    side: tuple[int, int] | None,
    processor: str,
    reference: Any,
    refused: Sequence[str],
) -> dict[str, Any]:
    """What every processor's settings have in a manifest. Raises UnsupportedModelError for one of `refused`, and for what the
    runtime always does."""
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
