"""The tokenizer of a bundle: a thin, checked wrapper of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..errors import BundleError


class Tokenizer:
    """Encodes and decodes text exactly as `transformers` does with the same `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        # A saved tokenizer may cut or pad on its own; over-long prompts must be refused, never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.byte_ids = _byte_fallback_ids(backend)
        self._alone: dict[int, str] = {}

    @classmethod
    def open(cls, path: Path | str) -> Tokenizer:
        """Read a `tokenizer.json`. Raises `BundleError` when the file cannot be used."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for any defect
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BundleError(
                f"{path}: not a readable tokenizer ({reason}); build the bundle again"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids, int64 [n]; `add_special_tokens` adds what the post-processor says (T5: `</s>`)."""
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def alone(self, token_id: int) -> str:
        """Text of one token, special tokens included; kept, for streams ask for it at every token."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int | None) -> str | None:
        """The written form of a token id, or None."""
        return None if token_id is None else self.backend.id_to_token(token_id)

    def id(self, token: str) -> int | None:
        """The id of a token's written form, or None."""
        return self.backend.token_to_id(token)


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of `<0x00>`…`<0xFF>` where the decoder joins runs of them into characters."""
    decoder: Any = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
    if "ByteFallback" not in kinds:
        return frozenset()
    found = (backend.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return frozenset(i for i in found if i is not None)
