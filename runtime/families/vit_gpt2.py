"""ViT and GPT-2: a picture becomes hidden states that cross-attention reads; a prompt is the beginning of the
caption."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common.errors import PromptError
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, Source, View, decoder_start, one_view
from .fixed import fixed_view, incomplete


class ViTGPT2:
    """Source of the layout: transformers `VisionEncoderDecoderModel.generate(pixel_values, decoder_input_ids)`."""

    name = "vit-gpt2"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture is `text.image_rows` hidden states."""
        return fixed_view(bundle, image, incomplete(self.name, "image", "text.image_rows"))

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Every source row is an image row; the decoder gets its start token, then the prompt without special tokens."""
        manifest = bundle.manifest
        text, view = manifest.text, one_view(self, bundle, image)
        if isinstance(prompt, list):
            raise PromptError("this model has no chat template: give the prompt as text, not as messages")
        words = as_text(text.default_prompt or "" if prompt is None else prompt)
        ids = bundle.tokenizer.encode(words, add_special_tokens=False)
        # One position each is kept for the start token and for the first new one.
        limit = manifest.limits.max_length
        check_length(ids, limit - 2, f"max_length ({limit}) less two")
        check_ids(ids, text.vocab_size)
        slots = np.arange(view.num_embeds, dtype=np.int64)
        return Prepared(
            np.full(len(slots), text.pad_token_id or 0, dtype=np.int64),
            (view,),
            image_positions=slots,
            decoder_ids=np.concatenate([decoder_start(manifest), ids]),
        )
