"""The ids of a conversation, for every family whose models have a chat template."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..text.chat import render_chat
from ..text.prompt import as_text
from .base import Source


def chat_ids(bundle: Source, template: str, messages: list[dict[str, Any]]) -> np.ndarray:
    """int64 [n]: the template's text with the turn of the answer opened. It writes every special token itself.

    Raises `BundleError` for a broken template, `PromptError` for messages that it refuses.
    """
    text, tokenizer = bundle.manifest.text, bundle.tokenizer
    rendered = render_chat(
        template,
        messages,
        bos_token=tokenizer.token(text.bos_token_id),
        eos_token=tokenizer.token(next(iter(text.eos_token_ids), None)),
    )
    return tokenizer.encode(as_text(rendered), add_special_tokens=False)
