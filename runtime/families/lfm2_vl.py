"""LFM2-VL: pictures at nearly their own size, large ones in tiles, each behind its name in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import ImageError
from ..images.load import load_image
from ..images.naflex import Naflex, tower_inputs
from ..images.processors.naflex import crops, patches_of, settings_of
from ..images.processors.patches import positive
from ..images.video import Video
from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import incomplete
from .parts import gather_media

Written = tuple[str | int, ...]
TILE = "<|img_row_{row}_col_{column}|>"


@dataclass(frozen=True)
class Marks:
    """The token that holds the place of an embedding, which is also what a template writes for a picture, those before and
    behind a picture, and that before the whole one where it stands behind its tiles."""

    image: str
    start: str
    end: str
    thumbnail: str

    @classmethod
    def of(cls, bundle: Source) -> Marks:
        """A bundle's. Raises `BundleError` for a manifest that does not name them."""
        settings, image = bundle.manifest.image, bundle.tokenizer.token(bundle.manifest.text.image_token_id)
        fields = ("image_start_token", "image_end_token", "image_thumbnail_token")
        around = [None if settings is None else settings.extra.get(name) for name in fields]
        if image is None or not all(isinstance(token, str) for token in around):
            raise incomplete(Lfm2VL.name, *(f"image.{name}" for name in fields), "text.image_token_id")
        return cls(image, *around)  # type: ignore[arg-type]

    @property
    def media(self) -> Media:
        """What stands beside text in a prompt of this family."""
        return {"image": Medium(self.image, self.image, "pictures")}


class Lfm2VL:
    """Source of the layout: transformers `Lfm2VlProcessor`."""

    name = "lfm2-vl"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture has as many embeddings as its tiles and the whole one have units (`Naflex`). Each is a run
        of the tower (`tower_inputs`)."""
        if isinstance(image, Video):
            raise ImageError("this model reads pictures, no videos: give frames of it as pictures")
        settings, marks = bundle.manifest.image, Marks.of(bundle)
        assert settings is not None
        loaded, naflex, side = load_image(image), settings_of(settings), positive(settings, "table_side")
        grid, whole = naflex.grid(loaded.height, loaded.width), naflex.whole(loaded.height, loaded.width)
        written = picture_text(grid, naflex, naflex.units(whole), marks)
        count = sum(piece for piece in written if isinstance(piece, int))

        def read() -> tuple[dict[str, np.ndarray], ...]:
            return tuple(crop_inputs(pixels, naflex, side) for pixels in crops(loaded, settings, naflex))

        return View("image", count, read, grid, picture=loaded, written=written)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` themselves, else they come first."""
        media, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(bundle, prompt, views_of(self, bundle, media), Marks.of(bundle).media)
        return Prepared(layout.ids, layout.views, layout.slots if layout.views else None)


def crop_inputs(pixels: np.ndarray, naflex: Naflex, side: int) -> dict[str, np.ndarray]:
    """Inputs of the `vision` graph for `pixel_values` float32 [1, 3, H, W]."""
    down, across = (length // naflex.patch_size for length in pixels.shape[2:])
    return tower_inputs(patches_of(pixels, naflex.patch_size), down, across, naflex.merge_size, side)


def picture_text(grid: tuple[int, int], naflex: Naflex, units: int, marks: Marks) -> Written:
    """What a picture becomes that is cut into a `grid` of tiles, and has so many `units` as a whole; transformers'
    `Lfm2VlProcessor._build_image_tokens`."""
    down, across = grid
    if (down, across) == (1, 1):
        return marks.start, units, marks.end
    pieces: list[str | int] = []
    before = marks.start
    for row in range(1, down + 1):
        for column in range(1, across + 1):
            pieces += [before + TILE.format(row=row, column=column), naflex.tile_units]
            before = ""
    if naflex.thumbnail:
        pieces += [marks.thumbnail, units]
    return (*pieces, marks.end)


def described(naflex: Naflex, side: int) -> dict[str, Any]:
    """The fields of a manifest's `image` that `settings_of` and `view` read."""
    return {
        "patch_size": naflex.patch_size, "merge_size": naflex.merge_size, "tile_size": naflex.tile_size,
        "min_tiles": naflex.min_tiles, "max_tiles": naflex.max_tiles, "use_thumbnail": naflex.thumbnail,
        "min_image_tokens": naflex.min_units, "max_image_tokens": naflex.max_units,
        "max_pixels_tolerance": naflex.tolerance, "table_side": side,
    }  # fmt: skip
