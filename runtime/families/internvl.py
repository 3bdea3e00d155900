"""InternVL3 and InternVL3.5: pictures in tiles, anywhere in a prompt or a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import ImageError
from ..images.load import load_image
from ..images.processors import preprocess
from ..images.processors.aspect_tiles import settings_of
from ..images.video import Video
from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import incomplete
from .parts import gather_media


@dataclass(frozen=True)
class Marks:
    """The token that holds the place of an embedding, which is also what a template writes for a picture, and those before
    and behind a picture."""

    context: str
    start: str
    end: str

    @classmethod
    def of(cls, bundle: Source) -> Marks:
        """A bundle's. Raises `BundleError` for a manifest that does not name them."""
        settings, context = (
            bundle.manifest.image,
            bundle.tokenizer.token(bundle.manifest.text.image_token_id),
        )
        extra = {} if settings is None else settings.extra
        around = (extra.get("start_image_token"), extra.get("end_image_token"))
        if context is None or not all(isinstance(token, str) for token in around):
            fields = ("image.start_image_token", "image.end_image_token", "text.image_token_id")
            raise incomplete(InternVL.name, *fields)
        return cls(context, *around)  # type: ignore[arg-type]

    @property
    def media(self) -> Media:
        """What stands beside text in a prompt of this family."""
        return {"image": Medium(self.context, f"{self.context}\n", "pictures")}


class InternVL:
    """Source of the layout: transformers `InternVLProcessor`."""

    name = "internvl"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture's embeddings follow from the number of its tiles (`AspectTiling.tiles`). The tower's input
        is `pixel_values` float32 [tiles, 3, side, side]."""
        if isinstance(image, Video):
            raise ImageError("this model reads pictures, no videos: give frames of it as pictures")
        settings, marks = bundle.manifest.image, Marks.of(bundle)
        assert settings is not None
        loaded = load_image(image)
        tiling, each = settings_of(settings)
        num_embeds = tiling.tiles(loaded.height, loaded.width) * each

        def read() -> tuple[dict[str, np.ndarray], ...]:
            return ({"pixel_values": preprocess(loaded, settings)},)

        written = (marks.start, num_embeds, marks.end)
        return View("image", num_embeds, read, picture=loaded, written=written)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<IMG_CONTEXT>` themselves, once for a picture, else the pictures come first."""
        media, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(bundle, prompt, views_of(self, bundle, media), Marks.of(bundle).media)
        return Prepared(layout.ids, layout.views, layout.slots if layout.views else None)
