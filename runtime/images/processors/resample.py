"""Names of resampling filters in a manifest."""

from __future__ import annotations

from PIL.Image import Resampling

from ...common.errors import BundleError

FILTERS = {
    "nearest": Resampling.NEAREST,
    "box": Resampling.BOX,
    "bilinear": Resampling.BILINEAR,
    "hamming": Resampling.HAMMING,
    "bicubic": Resampling.BICUBIC,
    "lanczos": Resampling.LANCZOS,
}


def resampling(name: str) -> Resampling:
    """The Pillow filter called `name`. Raises `BundleError` for another name."""
    if name not in FILTERS:
        raise BundleError(f"manifest field 'image.resample': {name!r} is not one of {', '.join(FILTERS)}")
    return FILTERS[name]
