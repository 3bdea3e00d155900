"""Llama: text only. A chat template when the bundle has one, else the plain prompt."""

from __future__ import annotations

from typing import Any

from ..common.errors import PromptError
from ..text.messages import check_messages
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, RawPrompt, Source, View, image_list, text_only
from .chat import chat_ids
from .parts import gather_media


class Llama:
    """Source of the layout: transformers `apply_chat_template(..., add_generation_prompt=True)`."""

    name = "llama"

    def view(self, bundle: Source, image: Any) -> View:
        """Raises `ImageError`: there is no vision tower."""
        raise text_only()

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message; a list is a whole conversation; `RawPrompt` skips the template."""
        manifest, tokenizer = bundle.manifest, bundle.tokenizer
        media, prompt = gather_media(image_list(image), prompt)
        if media:
            raise text_only()
        if prompt is None:
            prompt = manifest.text.default_prompt
        if prompt is None:
            raise PromptError("this model needs a prompt (--prompt TEXT)")
        template = manifest.text.chat_template
        if isinstance(prompt, list):
            if not template:
                raise PromptError(
                    "this bundle has no chat template: give the prompt as text, not as messages"
                )
            messages = check_messages(prompt)
        else:
            words = as_text(prompt)
            if not words.strip():
                raise PromptError("the prompt is empty; this model needs one (--prompt TEXT)")
            messages = None if isinstance(prompt, RawPrompt) else [{"role": "user", "content": words}]
        if template and messages is not None:
            ids = chat_ids(bundle, template, messages)
        else:
            ids = tokenizer.encode(words)
        if not len(ids):
            raise PromptError("the prompt has no tokens; write some text")
        # One position is kept for the first new token.
        check_length(
            ids, manifest.limits.max_length - 1, f"max_length ({manifest.limits.max_length}) less one"
        )
        check_ids(ids, manifest.text.vocab_size)
        return Prepared(ids)
