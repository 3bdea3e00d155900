"""LLaVA-1.5: pictures anywhere in a prompt or a conversation, each as many rows, as `LlavaProcessor` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import BundleError, PromptError
from ..images.load import load_image
from ..images.processors import preprocess
from ..text.chat import check_messages
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, RawPrompt, Source, image_list
from .chat import chat_ids


class Llava:
    """Source of the layout: transformers `LlavaProcessor.__call__` and its `apply_chat_template`."""

    name = "llava"

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` themselves, else the pictures come first."""
        manifest, tokenizer = bundle.manifest, bundle.tokenizer
        text, settings = manifest.text, manifest.image
        mark = tokenizer.token(text.image_token_id)
        if settings is None or text.image_token_id is None or not text.image_rows or mark is None:
            raise BundleError(
                "manifest fields 'image', 'text.image_token_id' and 'text.image_rows' must be set for family 'llava'; "
                "build the bundle again"
            )
        images = image_list(image)
        if prompt is None:
            prompt = text.default_prompt or ""
        if isinstance(prompt, list) and not text.chat_template:
            raise PromptError("this bundle has no chat template: give the prompt as text, not as messages")
        asked = prompt if isinstance(prompt, list | RawPrompt) else as_text(prompt)
        turns = placed(asked, len(images), text.chat_template, mark)
        if isinstance(turns, str):
            ids = tokenizer.encode(as_text(turns))
        else:
            ids = chat_ids(bundle, text.chat_template or "", turns)
        marks = ids == text.image_token_id
        count = int(np.count_nonzero(marks))
        if count != len(images):
            raise PromptError(
                f"the prompt has {count} {mark}, and {len(images)} pictures were given: one for each"
            )
        ids = np.repeat(ids, np.where(marks, text.image_rows, 1))
        if not len(ids):
            raise PromptError("the prompt has no tokens; write some text")
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


def placed(prompt: str | Sequence[Any], images: int, template: Any, mark: str) -> str | list[dict[str, Any]]:
    """Messages for the chat template, or, without one and for a `RawPrompt`, text with a mark per picture.

    Raises `PromptError` for messages that are none, and for a mark that was typed where the template writes them.
    """
    if not isinstance(prompt, str):
        return check_messages(list(prompt))
    if not template or isinstance(prompt, RawPrompt):
        return prompt if mark in prompt else f"{mark}\n" * images + prompt
    if mark in prompt:
        raise PromptError(
            f"the prompt contains {mark!r}, which stands for a picture: leave it out, or give the prompt raw"
        )
    content = [{"type": "image"}] * images + [{"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}]
