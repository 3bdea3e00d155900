"""The bytes that a token stands for: what answers with log-probabilities show of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .growth import state_of
from .tokenizer import Tokenizer

SPACE = "▁"
"""How tokenizers write a space whose decoder is Metaspace, or replaces it."""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Those of a text, with the space that a token begins with; part of a character where a token is part of one. Special
    tokens as they are written. Empty for an id without a token."""
    written = tokenizer.token(token)
    if written is None or token in tokenizer.special_ids:
        return (written or "").encode()
    if token in tokenizer.byte_ids:
        return bytes([int(written[3:5], 16)])  # <0x0A>
    if "ByteLevel" in _decoders(tokenizer):
        known = _bytes_of_characters()
        parts = [bytes([known[each]]) if each in known else each.encode() for each in written]
        return b"".join(parts)
    return written.replace(SPACE, " ").encode()


def _decoders(tokenizer: Tokenizer) -> set[Any]:
    state = state_of(tokenizer.backend.decoder) or {}
    return {state.get("type"), *(part.get("type") for part in state.get("decoders", ()))}


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: bytes that are printable characters stand for themselves, the others for those from 256 on."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    return {chr(byte): byte for byte in themselves} | {chr(256 + at): byte for at, byte in enumerate(others)}
