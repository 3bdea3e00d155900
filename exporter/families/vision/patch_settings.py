"""Settings of processors that cut pictures and frames of any size into patches, translated for the manifest."""

from __future__ import annotations

from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.grid import Grid
from ..common.images import RESAMPLE, described_processor


def patched_image(
    settings: dict[str, Any], grid: Grid, processor: str, reference: Any, most_pixels: int | None = None
) -> dict[str, Any]:
    """Settings of a processor that resizes to whole units of patches, rescales and normalises; see `square_image`.

    `grid` is the tower's. Pictures keep between `min_pixels` and `max_pixels`, which `most_pixels` lowers.
    """
    described = described_processor(settings, None, processor, reference, refused=())
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
    tokens_per_second: float | None,
    most_pixels: int | None = None,
) -> dict[str, Any]:
    """Settings of a processor that samples frames as `runtime/images/sampling/qwen2_vl.py` does, and reads them as `image`
    (see `patched_image`) says.

    `most_pixels` lowers the bounds of a frame. `settings` are the video processor's; {} for a folder without any, whose
    authors read videos by the defaults here (qwen-vl-utils; transformers' `Qwen2VLVideoProcessor`), not by the pictures'
    bounds.
    Raises UnsupportedModelError where frames are not read as pictures are.
    """
    _check_alike(settings, image)
    size, unit = settings.get("size") or {}, (image["patch_size"] * image["merge_size"]) ** 2
    pixels = {
        "min_pixels": _asked(settings, "min_pixels", size.get("shortest_edge", 128 * unit)),
        "max_pixels": _asked(settings, "max_pixels", size.get("longest_edge", 768 * unit)),
    }
    if most_pixels is not None:
        pixels = {name: min(most_pixels, value) for name, value in pixels.items()}
    described = {
        "token_id": token_id,
        **_rate(settings),
        **pixels,
        "max_rows": int(_asked(settings, "max_video_tokens", 128_000) * 0.9),
    }
    return described if tokens_per_second is None else {**described, "tokens_per_second": tokens_per_second}


def timed_video(
    settings: dict[str, Any], image: dict[str, Any], token_id: int, most_pixels: int | None = None
) -> dict[str, Any]:
    """Settings of a processor that samples frames as `runtime/images/sampling/qwen3_vl.py` does; see `sampled_video`.

    `min_pixels` and `max_pixels` are those of all frames of a video together, `max_frame_rows` bounds one frame, as
    `cap_pixels_per_frame` does and `most_pixels`.
    Raises UnsupportedModelError where frames are not read as pictures are.
    """
    _check_alike(settings, image)
    size, unit = settings.get("size") or {}, (image["patch_size"] * image["merge_size"]) ** 2
    least, most = size.get("shortest_edge", 128 * unit), size.get("longest_edge", 768 * unit)
    rate = _rate(settings)
    described = {"token_id": token_id, **rate, "min_pixels": least, "max_pixels": most}
    if settings.get("cap_pixels_per_frame"):
        described["max_frame_rows"] = _asked(settings, "max_video_tokens", 768)
    if most_pixels is not None:
        rows = max(1, most_pixels // unit)
        described["max_frame_rows"] = min(rows, described.get("max_frame_rows", rows))
        described["min_pixels"] = min(least, most_pixels)
    return described


def _asked(settings: dict[str, Any], name: str, default: Any) -> Any:
    return default if settings.get(name) is None else settings[name]


def _rate(settings: dict[str, Any]) -> dict[str, Any]:
    """How many frames are seen."""
    defaults = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    return {name: _asked(settings, name, default) for name, default in defaults.items()}


def _check_alike(settings: dict[str, Any], image: dict[str, Any]) -> None:
    """Raises UnsupportedModelError where frames are not read as pictures are."""
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
