"""The tokenizer of a bundle: a thin, checked wrapper of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..common.errors import BundleError, VlmexportError
from ..common.foreign_errors import is_foreign, raise_if_foreign
from .errors import one_line
from .growth import LARGEST, Growth, growth_of, state_of
from .marked import LaidOut, Marked

_MOST_NORMALIZED = 10 * LARGEST
"""Bytes that normalising all added tokens may make."""


class Tokenizer:
    """Encodes and decodes text exactly as `transformers` does with the same `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        """Raises `BundleError` for one that may make too much of a text (`growth.py`), or that has two texts for one id."""
        # A saved tokenizer may cut or pad on its own; over-long prompts must be refused, never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_tokens: dict[int, str] = {
            i: token.content for i, token in added.items() if token.special
        }
        """Id → written form."""
        self.special_ids = frozenset(self.special_tokens)
        # Not `to_str()`: it counts from 0 to the highest id, which may be any number, and takes memory for every gap.
        self.post_processor: Any = state_of(backend.post_processor)
        """What `tokenizer.json` says of it, or None."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        _check_ids(vocabulary, added)
        self.growth = growth_of(backend, vocabulary)
        _check_normalized(backend, added.values(), self.growth)
        self.byte_ids = _byte_fallback_ids(backend, state_of(backend.decoder))
        self._alone: dict[int, str] = {}

    @classmethod
    def open(cls, path: Path | str) -> Tokenizer:
        """Read a `tokenizer.json`. Raises `BundleError` when the file cannot be used."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise_if_foreign(error)
            raise BundleError(
                f"{path}: not a readable tokenizer ({one_line(error)}); build the bundle again"
            ) from error
        try:
            # Not `from_file`: it takes no path that the locale cannot write.
            tokenizer = cls(tokenizers.Tokenizer.from_buffer(data))
        except BundleError as error:
            raise BundleError(f"{path}: {error}") from error
        except BaseException as error:  # the library raises bare Exception for any defect
            if not _of_library(error):
                raise
            raise BundleError(
                f"{path}: not a readable tokenizer ({one_line(error)}); build the bundle again"
            ) from error
        unknown = unknown_tokens(tokenizer.post_processor)
        if unknown:  # the library would panic at the first prompt, with a page on stderr
            raise BundleError(
                f"{path}: its post-processor adds {unknown[0]!r:.80}, which it does not define; build the bundle again"
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids, int64 [n]; `add_special_tokens` adds what the post-processor says (T5: `</s>`)."""
        return np.asarray(self._encoding(text, add_special_tokens).ids, dtype=np.int64)

    def encode_laid_out(self, prompt: LaidOut) -> np.ndarray:
        """Token ids, int64 [n], of a prompt. Only `PlainTokenizer` asks which of it is the caller's."""
        return self.encode(prompt.text, prompt.add_special_tokens(prompt.text))

    def layout_of(self, prompt: LaidOut) -> Marked:
        """What of a prompt is read as its layout: here all of it."""
        return Marked(prompt.text, {})

    def _encoding(
        self, text: str, add_special_tokens: bool, backend: tokenizers.Tokenizer | None = None
    ) -> tokenizers.Encoding:
        try:
            self.growth.check(text)
            return (backend or self.backend).encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise _defect(error, "encode") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        try:
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise _defect(error, "decode") from error

    def alone(self, token_id: int) -> str:
        """Text of one token, special tokens included; kept, for streams ask for it at every token."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int | None) -> str | None:
        """The written form of a token id, or None."""
        try:
            return None if token_id is None else self.backend.id_to_token(token_id)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise _defect(error, f"write token {token_id!r:.40}") from error

    def id(self, token: str) -> int | None:
        """The id of a token's written form, or None."""
        try:
            return self.backend.token_to_id(token)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise _defect(error, f"find {token!r:.40}") from error


def is_panic(error: BaseException) -> bool:
    """Whether Rust code of the library gave up. Its exception derives from BaseException, and its class cannot be imported."""
    kind = type(error)
    return kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime"


def _of_library(error: BaseException) -> bool:
    """Whether the library raised it, whose code has no frames of Python; not Ctrl-C, and not a handler of a program's."""
    return is_panic(error) or (
        isinstance(error, Exception)
        and not isinstance(error, VlmexportError | MemoryError)
        and not is_foreign(error)
    )


def _defect(error: BaseException, what: str) -> BundleError:
    return BundleError(
        f"the bundle's tokenizer cannot {what} ({one_line(error, 200)}); build the bundle again"
    )


def unknown_tokens(processor: Any, parts: Sequence[str] = ("single",)) -> list[str]:
    """Tokens that a template of a post-processor adds to texts without defining them: the library panics there.

    Args:
        processor: as `tokenizer.json` holds it.
        parts: `single` for the template of one text, `pair` for that of two.
    """
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "Sequence":
        return [name for part in processor.get("processors") or () for name in unknown_tokens(part, parts)]
    if processor.get("type") != "TemplateProcessing":
        return []
    defined = processor.get("special_tokens") or ()
    pieces = (piece for part in parts for piece in processor.get(part) or ())
    added = (piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece)
    return [name for name in added if name not in defined]


def _check_ids(vocabulary: Mapping[str, int], added: Collection[int]) -> None:
    """Raises `BundleError` where two tokens have one id: which of them the library decodes differs from run to run.

    The text of an `added` token hides that of the vocabulary.
    """
    if len(set(vocabulary.values())) == len(vocabulary):
        return
    token_of_id: dict[int, str] = {}
    for token, i in sorted(vocabulary.items()):
        other = token_of_id.setdefault(i, token)
        if other != token and i not in added:
            raise BundleError(
                f"the tokenizer has two tokens of id {i}, {other!r:.80} and {token!r:.80}; use the model's own tokenizer"
            )


def _check_normalized(
    backend: tokenizers.Tokenizer, added: Collection[tokenizers.AddedToken], growth: Growth
) -> None:
    """Raises `BundleError` where two added tokens are looked for as one text: which of them the library finds differs from
    run to run."""
    tokens = [token for token in added if token.normalized]
    if backend.normalizer is None or not tokens:
        return
    size = sum(len(token.content.encode()) for token in tokens) * growth.factor
    if size > _MOST_NORMALIZED:
        raise BundleError(
            f"the tokenizer may make {size:,} bytes of its added tokens, more than {_MOST_NORMALIZED:,}; use the model's own "
            "tokenizer"
        )
    token_of_text: dict[str, str] = {}
    for token in tokens:
        text = backend.normalizer.normalize_str(token.content)
        other = token_of_text.setdefault(text, token.content)
        if other != token.content:
            raise BundleError(
                f"the tokenizer makes one text of its tokens {other!r:.80} and {token.content!r:.80}; use the model's own "
                "tokenizer"
            )


def _byte_fallback_ids(backend: tokenizers.Tokenizer, decoder: Any) -> frozenset[int]:
    """Ids of `<0x00>`…`<0xFF>` where the decoder joins runs of them into characters."""
    decoder = decoder or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
    if "ByteFallback" not in kinds:
        return frozenset()
    ids = (backend.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return frozenset(i for i in ids if i is not None)
