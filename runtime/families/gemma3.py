"""Gemma 3: pictures anywhere in a prompt or a conversation, each between two tokens and lines of its own, as
`Gemma3Processor` lays them out. The rows of a picture see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import fixed_view, incomplete
from .parts import gather_media

BEGIN, END = "<start_of_image>", "<end_of_image>"


class Gemma3:
    """Source of the layout: transformers `Gemma3Processor` without pan and scan, and `get_block_sequence_ids_for_mask`."""

    name = "gemma3"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; every picture is `text.image_rows` embeddings."""
        lacking = incomplete(self.name, "image", "text.image_token_id", "text.image_rows")
        view = fixed_view(bundle, image, lacking)
        return replace(view, written=(f"\n\n{BEGIN}", view.num_embeds, f"{END}\n\n"))

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<start_of_image>` themselves, else the pictures come first."""
        slot = bundle.tokenizer.token(bundle.manifest.text.image_token_id)
        if slot is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        media, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(bundle, prompt, views_of(self, bundle, media), pictures(slot))
        blocks = tuple(
            (start, start + span)
            for view, starts in zip(layout.views, layout.starts, strict=True)
            for start, span in zip(starts, view.spans, strict=True)
        )
        return Prepared(layout.ids, layout.views, layout.slots if layout.views else None, blocks=blocks)


def pictures(slot: str) -> Media:
    """What stands beside text in a prompt of this family; `slot` is the token in place of each embedding."""
    return {"image": Medium(BEGIN, BEGIN, "pictures", slot=slot or None)}
