"""LLaVA-NeXT (LLaVA-1.6): pictures anywhere in a prompt or a conversation, each with rows as its size asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BundleError
from ..images.load import load_image
from ..images.processors import preprocess
from ..images.processors.tiles import settings_of
from .base import Prepared, Prompt, Source, View, views_of
from .chat import laid_out
from .llava import pictures


class LlavaNext:
    """Source of the layout: transformers `LlavaNextProcessor.__call__` and its `apply_chat_template`."""

    name = "llava-next"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture's rows follow from its size (`Tiling.row_index`). The tower's inputs are `pixel_values`
        float32 [tiles, 3, side, side] and `row_index` int64 [rows]."""
        settings = bundle.manifest.image
        if settings is None:
            raise _incomplete()
        loaded = load_image(image)
        index = settings_of(settings).row_index(loaded.height, loaded.width)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            return ({"pixel_values": preprocess(loaded, settings), "row_index": index},)

        return View("image", len(index), read)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` themselves, else the pictures come first."""
        mark = bundle.tokenizer.token(bundle.manifest.text.image_token_id)
        if mark is None:
            raise _incomplete()
        found = laid_out(bundle, prompt, views_of(self, bundle, image), pictures(mark))
        return Prepared(found.ids, found.views, found.slots if found.views else None)


def _incomplete() -> BundleError:
    return BundleError(
        "manifest fields 'image' and 'text.image_token_id' must be set for family 'llava-next'; build the bundle again"
    )
