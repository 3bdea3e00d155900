"""Checks of prompts before they reach a tokenizer, and the limits they must keep."""

from __future__ import annotations

import codecs

import numpy as np

from ..common.errors import PromptError, PromptTooLongError

LONGEST = 1_000_000
"""Characters. Above this the prompt is refused before tokenizing, which would take seconds."""


def as_text(prompt: object) -> str:
    """The prompt as a string. Raises `PromptError` for anything that is not text, or not UTF-8."""
    if isinstance(prompt, bytes | bytearray):
        if len(prompt) > 4 * LONGEST:
            raise PromptTooLongError(f"the prompt has {len(prompt)} bytes; the limit is {LONGEST} characters")
        try:
            return bytes(prompt).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
            ) from error
    if not isinstance(prompt, str):
        raise PromptError(f"a prompt is text, not {type(prompt).__name__}")
    if len(prompt) > LONGEST:
        raise PromptTooLongError(f"the prompt has {len(prompt)} characters; the limit is {LONGEST}")
    for at, character in enumerate(prompt):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise PromptError(
                f"the prompt is not valid text: lone surrogate U+{ord(character):04X} at position {at} "
                "(bytes that are not UTF-8?)"
            )
    return prompt


_MARKS = {
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Byte order mark → encoding; the mark of UTF-32 begins with that of UTF-16."""


def from_pipe(data: bytes) -> str:
    """A prompt that a pipe or a file gives: without the byte order mark, which may say UTF-16 or UTF-32, and without one
    line end, which shells and editors put behind a text. Raises `PromptError` for what is not text."""
    encoding = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    if encoding in ("utf-16", "utf-32"):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt is not {encoding.upper()}, as its byte order mark says: position {error.start}; save it as UTF-8"
            ) from error
    else:
        text = as_text(data.removeprefix(codecs.BOM_UTF8))
    if "\0" in text:
        raise PromptError(
            f"the prompt has a NUL character at position {text.index(chr(0))}: UTF-16 without a byte order mark? save it as "
            "UTF-8"
        )
    return as_text(text.removesuffix("\n").removesuffix("\r"))


def check_length(token_ids: np.ndarray, limit: int, what: str) -> None:
    """Refuse more than `limit` positions of a prompt. `what` names the limit and how to raise it."""
    if len(token_ids) > limit:
        raise PromptTooLongError(f"the prompt has {len(token_ids)} tokens; {what} allows {limit}: shorten it")


def check_ids(token_ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids without an embedding row (a tokenizer that does not belong to the model)."""
    if len(token_ids) and int(token_ids.max()) >= vocab_size:
        raise PromptError(
            f"the prompt contains token {int(token_ids.max())}; the model knows {vocab_size} tokens"
        )
