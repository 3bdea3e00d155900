"""Image processor settings, translated for the manifest; what the runtime cannot do is refused by name."""

from __future__ import annotations

import math
from typing import Any

from ...runtime.errors import UnsupportedModelError

RESAMPLE = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # PIL.Image.Resampling
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def square_image(
    settings: dict[str, Any], side: tuple[int, int], processor: str, reference: str
) -> dict[str, Any]:
    """Settings of a processor that resizes every image to one size, rescales and normalises (BLIP's).

    `side` is (height, width) that the vision tower takes.
    """
    for name in ("do_center_crop", "do_pad"):
        if settings.get(name):
            raise UnsupportedModelError(f"image processor: {name}=true is not supported")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(name) is False:
            raise UnsupportedModelError(f"image processor: {name}=false is not supported")
    size = settings.get("size") or {"height": side[0], "width": side[1]}
    found = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if found != side:
        raise UnsupportedModelError(
            f"image processor: size {size} differs from the vision tower's {side[0]} x {side[1]}"
        )
    resample = settings.get("resample", 3)
    if type(resample) is not int or resample not in RESAMPLE:
        raise UnsupportedModelError(f"image processor: resample={resample!r} is unknown")
    return {
        "processor": processor,
        "height": side[0],
        "width": side[1],
        "resample": RESAMPLE[resample],
        "rescale_factor": settings.get("rescale_factor", 1 / 255),
        "mean": _channels(settings, "image_mean", CLIP_MEAN),
        "std": _channels(settings, "image_std", CLIP_STD),
        "reference": reference,
    }


def _channels(settings: dict[str, Any], name: str, default: tuple[float, ...]) -> list[float]:
    values = settings.get(name) or default
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_number, values)):
        raise UnsupportedModelError(f"image processor: {name}={values!r:.80} is not three numbers")
    return list(values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
