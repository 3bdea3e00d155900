"""Pictures that all become the same number of embeddings; what families that read them share."""

from __future__ import annotations

from typing import Any

from ..common.errors import BundleError
from ..images.load import load_image
from ..images.processors import preprocess
from .base import Source, View


def fixed_view(bundle: Source, image: Any, lacking: BundleError) -> View:
    """A picture as `text.image_rows` embeddings. Raises `ImageError`, and `lacking` for a manifest that does not say
    how."""
    settings, num_embeds = bundle.manifest.image, bundle.manifest.text.image_rows
    if settings is None or not num_embeds:
        raise lacking
    loaded = load_image(image)
    return View(
        "image", num_embeds, lambda: ({"pixel_values": preprocess(loaded, settings)},), picture=loaded
    )


def incomplete(family: str, *fields: str) -> BundleError:
    """What to say of a manifest without fields that `family` reads."""
    names = ", ".join(f"'{field}'" for field in fields[:-1]) + f" and '{fields[-1]}'"
    return BundleError(f"manifest fields {names} must be set for family '{family}'; build the bundle again")
