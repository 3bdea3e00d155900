"""Checks of prompts before they reach a tokenizer, and the limits they must keep."""

from __future__ import annotations

import numpy as np

from ..errors import PromptError

LONGEST = 1_000_000
"""Characters. Above this the prompt is refused before tokenizing, which would take seconds."""


def as_text(prompt: object) -> str:
    """The prompt as a string. Raises `PromptError` for anything that is not text, or not UTF-8."""
    if isinstance(prompt, bytes | bytearray):
        if len(prompt) > 4 * LONGEST:
            raise PromptError(f"the prompt has {len(prompt)} bytes; the limit is {LONGEST} characters")
        try:
            return bytes(prompt).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
            ) from error
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is text, not {type(prompt).__name__}")
    if len(prompt) > LONGEST:
        raise PromptError(f"the prompt has {len(prompt)} characters; the limit is {LONGEST}")
    for at, character in enumerate(prompt):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise PromptError(
                f"the prompt is not valid text: lone surrogate U+{ord(character):04X} at position {at} "
                "(bytes that are not UTF-8?)"
            )
    return prompt


def check_length(token_ids: np.ndarray, limit: int, what: str) -> None:
    """Refuse more than `limit` prompt rows. `what` names the limit and how to raise it."""
    if len(token_ids) > limit:
        raise PromptError(f"the prompt has {len(token_ids)} tokens; {what} allows {limit}: shorten it")


def check_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids without an embedding row (a tokenizer that does not belong to the model)."""
    if len(token_ids) and int(token_ids.max()) >= vocab_size:
        raise PromptError(
            f"the prompt contains token {int(token_ids.max())}; the model knows {vocab_size} tokens"
        )
