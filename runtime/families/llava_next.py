"""LLaVA-NeXT (LLaVA-1.6): pictures anywhere in a prompt or a conversation, each with as many embeddings as its size
asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..images.load import load_image
from ..images.processors import preprocess
from ..images.processors.tiles import settings_of
from .base import Source, View
from .fixed import incomplete
from .llava import Llava


class LlavaNext(Llava):
    """Source of the layout: transformers `LlavaNextProcessor.__call__` and its `apply_chat_template`."""

    name = "llava-next"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture's embeddings follow from its size (`Tiling.row_index`). The tower's inputs are
        `pixel_values` float32 [tiles, 3, side, side] and `row_index` int64 [num_embeds]."""
        settings = bundle.manifest.image
        if settings is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        loaded = load_image(image)
        index = settings_of(settings).row_index(loaded.height, loaded.width)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            return ({"pixel_values": preprocess(loaded, settings), "row_index": index},)

        return View("image", len(index), read, picture=loaded)
