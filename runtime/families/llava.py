"""LLaVA-1.5: pictures anywhere in a prompt or a conversation, each as many embeddings, as `LlavaProcessor` lays them
out."""

from __future__ import annotations

from typing import Any

from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import fixed_view, incomplete
from .parts import gather_media


class Llava:
    """Source of the layout: transformers `LlavaProcessor.__call__` and its `apply_chat_template`."""

    name = "llava"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; every picture is `text.image_rows` embeddings."""
        return fixed_view(
            bundle, image, incomplete(self.name, "image", "text.image_token_id", "text.image_rows")
        )

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` themselves, else the pictures come first."""
        mark = bundle.tokenizer.token(bundle.manifest.text.image_token_id)
        if mark is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        media, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(bundle, prompt, views_of(self, bundle, media), pictures(mark))
        return Prepared(layout.ids, layout.views, layout.slots if layout.views else None)


def pictures(mark: str) -> Media:
    """What stands beside text in a prompt of this family."""
    return {"image": Medium(mark, f"{mark}\n", "pictures")}
