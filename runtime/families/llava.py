"""LLaVA-1.5: pictures anywhere in a prompt or a conversation, each as many rows, as `LlavaProcessor` lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BundleError
from ..images.load import load_image
from ..images.processors import preprocess
from ..text.prompt import check_ids, check_length
from .base import Prepared, Prompt, Source, image_list
from .chat import Media, Medium, media_ids


class Llava:
    """Source of the layout: transformers `LlavaProcessor.__call__` and its `apply_chat_template`."""

    name = "llava"

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` themselves, else the pictures come first."""
        manifest, tokenizer = bundle.manifest, bundle.tokenizer
        text, settings = manifest.text, manifest.image
        mark = tokenizer.token(text.image_token_id)
        if settings is None or not text.image_rows or mark is None:
            raise BundleError(
                "manifest fields 'image', 'text.image_token_id' and 'text.image_rows' must be set for family 'llava'; "
                "build the bundle again"
            )
        images = image_list(image)
        ids = media_ids(bundle, prompt, ["image"] * len(images), pictures(mark))
        ids = np.repeat(ids, np.where(ids == text.image_token_id, text.image_rows, 1))
        limit = manifest.limits.max_length
        check_length(ids, limit - 1, f"max_length ({limit}) less one, image rows included")
        check_ids(ids, text.vocab_size)
        if not images:
            return Prepared(ids)
        return Prepared(
            ids,
            vision=tuple({"pixel_values": preprocess(load_image(each), settings)} for each in images),
            row_slots=np.flatnonzero(ids == text.image_token_id),
        )


def pictures(mark: str) -> Media:
    """What stands beside text in a prompt of this family."""
    return {"image": Medium(mark, f"{mark}\n", "pictures")}
