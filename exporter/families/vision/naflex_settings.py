"""Settings of a processor that reads pictures at nearly their own size, translated for the manifest."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.naflex import Naflex
from ..common.images import described_processor


class Lfm2VlImageProcessor:
    """What transformers' class of this name takes where settings are left out; the class itself needs torchvision."""

    resample: ClassVar[int] = 2
    image_mean: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    image_std: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    counts: ClassVar[dict[str, int]] = {
        "downsample_factor": 2, "min_tiles": 2, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256,
        "encoder_patch_size": 16, "tile_size": 512,
    }  # fmt: skip


def naflex_of(settings: dict[str, Any], most_pixels: int | None = None) -> Naflex:
    """Sizes of pictures and tiles. `most_pixels` lowers the number of tiles, below two to none, and then that of units. Raises
    UnsupportedModelError for settings that are no such numbers."""
    counts = dict(Lfm2VlImageProcessor.counts)
    for name in counts:
        given = settings.get(name)
        counts[name] = counts[name] if given is None else given
        if type(counts[name]) is not int or not 1 <= counts[name] <= 1 << 16:
            raise UnsupportedModelError(f"image processor: {name}={given!r:.40} is not in 1..{1 << 16}")
    for name in ("do_image_splitting", "use_thumbnail", "do_pad"):
        if settings.get(name) is not None and type(settings[name]) is not bool:
            raise UnsupportedModelError(
                f"image processor: {name}={settings[name]!r:.40} is not true or false"
            )
    if settings.get("do_pad") is False:  # the model's own forward needs the mask of a padded picture
        raise UnsupportedModelError("image processor: do_pad=false is not supported")
    tolerance = settings.get("max_pixels_tolerance", 2.0)
    if type(tolerance) not in (int, float) or not math.isfinite(tolerance) or not 0 < tolerance <= 1e6:
        raise UnsupportedModelError(
            f"image processor: max_pixels_tolerance={tolerance!r:.40} is no such number"
        )
    unit = counts["encoder_patch_size"] * counts["downsample_factor"]
    if counts["tile_size"] % unit:
        raise UnsupportedModelError(
            f"image processor: tile_size={counts['tile_size']} is not a multiple of encoder_patch_size times "
            f"downsample_factor, {unit}"
        )
    if settings.get("do_image_splitting") is False:
        counts["min_tiles"] = counts["max_tiles"] = 1
    if counts["min_tiles"] > counts["max_tiles"] or counts["max_tiles"] > 1024:
        raise UnsupportedModelError(
            f"image processor: min_tiles={counts['min_tiles']} and max_tiles={counts['max_tiles']} are no range below 1024"
        )
    if most_pixels is not None:
        counts["max_tiles"] = min(counts["max_tiles"], max(1, most_pixels // counts["tile_size"] ** 2))
        if counts["max_tiles"] < counts["min_tiles"]:
            counts["min_tiles"] = counts["max_tiles"] = 1
        counts["max_image_tokens"] = min(counts["max_image_tokens"], most_pixels // unit**2)
    if counts["min_image_tokens"] > counts["max_image_tokens"]:
        least = counts["min_image_tokens"] * unit**2
        raise UnsupportedModelError(
            "image processor: min_image_tokens is above max_image_tokens"
            if most_pixels is None
            else f"--max-pixels {most_pixels} is too small for this model, whose pictures have at least {least}"
        )
    return Naflex(
        patch_size=counts["encoder_patch_size"],
        merge_size=counts["downsample_factor"],
        tile_size=counts["tile_size"],
        min_tiles=counts["min_tiles"],
        max_tiles=counts["max_tiles"],
        thumbnail=settings.get("use_thumbnail") is not False,
        min_units=counts["min_image_tokens"],
        max_units=counts["max_image_tokens"],
        tolerance=float(tolerance),
    )


def naflex_image(settings: dict[str, Any]) -> dict[str, Any]:
    """What every processor's settings have in a manifest; see `described_processor`. Pictures are resized whatever `do_resize`
    says, as in transformers."""
    resized = {name: value for name, value in settings.items() if name != "do_resize"}
    return described_processor(resized, None, "lfm2-vl", Lfm2VlImageProcessor, refused=("do_center_crop",))
