"""A bundle's tokenizer as llguidance reads it: the bytes that each token stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign
from ..text.growth import state_of

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..text.tokenizer import Tokenizer

SPACE = "▁"
"""Of tokenizers that write a space so."""

_made: WeakKeyDictionary[Tokenizer, GrammarTokens] = WeakKeyDictionary()


class GrammarTokens:
    """`backend`: llguidance's `LLTokenizer`. `strips`: whether the text of an answer goes without the space that its first
    token begins with, so that a grammar must allow one there. `compiled`: grammars over it, the latest last."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises `OptionError` for a tokenizer that llguidance cannot read, and for a model without an end token."""
        import llguidance

        tokenizer, text = bundle.tokenizer, bundle.manifest.text
        if not text.eos_token_ids:
            raise OptionError("grammar: this model has no end token, so no answer of it would ever be whole")
        decoder = state_of(tokenizer.backend.decoder) or {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        size = max(text.vocab_size, tokenizer.vocab_size)
        source: Any
        if kinds & {"ByteLevel", "ByteFallback"}:
            source = (bundle.path / text.tokenizer).read_text(encoding="utf-8")
        elif "Metaspace" in kinds:
            source = llguidance.TokenizerWrapper(_Words(tokenizer, text.eos_token_ids[0]))
        else:
            known = ", ".join(sorted(str(kind) for kind in kinds))
            raise OptionError(f"grammar: a tokenizer with the decoder {known} is not supported")
        try:
            self.backend = llguidance.LLTokenizer(source, n_vocab=size, eos_token=[*text.eos_token_ids])
        except ValueError as error:
            raise_if_foreign(error)
            raise OptionError(f"grammar: llguidance cannot read this bundle's tokenizer ({error})") from None
        self.strips = _strips(tokenizer)
        self.compiled: dict[tuple[str, str], Any] = {}


def grammar_tokens(bundle: Bundle) -> GrammarTokens:
    """Made once per tokenizer: about 0.4 s for 50,000 tokens."""
    tokenizer = bundle.tokenizer
    if tokenizer not in _made:
        _made[tokenizer] = GrammarTokens(bundle)
    return _made[tokenizer]


class _Words:
    """What llguidance asks of a tokenizer whose tokens are written text, a space as `SPACE`."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        written = [tokenizer.token(token) or "" for token in range(tokenizer.vocab_size)]
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [token.replace(SPACE, " ").encode() for token in written]
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in tokenizer.special_ids}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Greedy: the longest token at each place. Proposals are spelled so, and verified; masks ask nobody."""
        ids, at = [], 0
        while at < len(text):
            for size in range(min(self._longest, len(text) - at), 0, -1):
                found = self._ids.get(text[at : at + size])
                if found is not None:
                    ids.append(found)
                    at += size
                    break
            else:
                break  # no token for this byte
        return ids


def _strips(tokenizer: Tokenizer) -> bool:
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=False)
    word = next((word for word in vocabulary if word.startswith(SPACE) and word[1:].isalpha()), None)
    return word is not None and tokenizer.decode([vocabulary[word]]) == word[1:]
