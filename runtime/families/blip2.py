"""BLIP-2: image embeddings first, then the prompt, as `Blip2Processor` lays them out, whatever language model reads
them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common.errors import PromptError
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, Source, View, decoder_start, one_view
from .fixed import fixed_view, incomplete


class Blip2:
    """Source of the layout: transformers `Blip2Processor.__call__`."""

    name = "blip2"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture is `text.image_rows` embeddings."""
        lacking = incomplete(self.name, "image", "text.image_token_id", "text.image_rows")
        if bundle.manifest.text.image_token_id is None:
            raise lacking
        return fixed_view(bundle, image, lacking)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Image-row slots, then the prompt (the bundle's default when None) with the tokenizer's special tokens.

        T5 reads them with its encoder and ends in `</s>`; a decoder-only model reads them itself, the start token behind
        the image embeddings.
        """
        manifest = bundle.manifest
        text, view = manifest.text, one_view(self, bundle, image)
        if isinstance(prompt, list):
            raise PromptError("this model has no chat template: give the prompt as text, not as messages")
        words = as_text(text.default_prompt or "" if prompt is None else prompt)
        ids = bundle.tokenizer.encode(words)
        if np.any(ids == text.image_token_id):
            written = bundle.tokenizer.token(text.image_token_id)
            raise PromptError(f"the prompt contains {written!r}, which stands for an image row: leave it out")
        token_ids = np.concatenate([np.full(view.num_embeds, text.image_token_id, dtype=np.int64), ids])
        limits, crossing = manifest.limits, manifest.decoder.cross_attention
        limit = (limits.max_source or limits.max_length) if crossing else limits.max_length - 1
        name = f"max_source ({limit})" if crossing else f"max_length ({limits.max_length}) less one"
        check_length(ids, limit - view.num_embeds, f"{name} less {view.num_embeds} image rows")
        check_ids(ids, text.vocab_size)
        return Prepared(
            token_ids,
            (view,),
            image_positions=np.arange(view.num_embeds, dtype=np.int64),
            decoder_ids=decoder_start(manifest) if crossing else None,
        )
