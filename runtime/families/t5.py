"""T5, text to text: the encoder reads the prompt, the decoder starts with a token of its own."""

from __future__ import annotations

from typing import Any

from ..common.errors import PromptError
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, Source, View, decoder_start, image_list, text_only


class T5:
    """Source of the layout: transformers `T5Tokenizer.__call__`, which ends every text with `</s>`."""

    name = "t5"

    def view(self, bundle: Source, image: Any) -> View:
        """Raises `ImageError`: there is no vision tower."""
        raise text_only()

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """The tokenizer's ids of the prompt, the bundle's default when None."""
        manifest = bundle.manifest
        if image_list(image):
            raise text_only()
        if isinstance(prompt, list):
            raise PromptError("this model has no chat template: give the prompt as text, not as messages")
        if prompt is None:
            prompt = manifest.text.default_prompt
        if prompt is None:
            raise PromptError("this model needs a prompt (--prompt TEXT)")
        ids = bundle.tokenizer.encode(as_text(prompt))
        if not len(ids):
            raise PromptError("the prompt has no tokens; write some text")
        limit = manifest.limits.max_source or manifest.limits.max_length
        check_length(ids, limit, f"max_source ({limit})")
        check_ids(ids, manifest.text.vocab_size)
        return Prepared(ids, decoder_ids=decoder_start(manifest))
