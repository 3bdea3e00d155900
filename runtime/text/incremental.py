"""Streaming detokenizer: hands out text as soon as no later token can change it."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from .stop import StopStrings
from .tokenizer import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Decodes token by token; the pieces joined equal the decoding of all tokens at once.

    Held back until certain: the bytes of an unfinished character, a run of byte-fallback tokens (one bad byte
    at its end turns the whole run into replacement characters), and a tail that may become a stop string.
    Each step decodes a window of two pieces, never the whole output: the cost per token is constant.

    A stop string that is or holds a special token is looked for in the text with special tokens, as transformers'
    `StopStringCriteria` does, any other in the text that is handed out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._byte_ids = tokenizer, tokenizer.byte_ids
        # By text, as the library does: a text may stand in the vocabulary under more ids than one.
        self._hidden = frozenset(tokenizer.special_tokens.values()) if skip_special_tokens else frozenset()
        self._stop = StopStrings(stop, self._hidden)
        self._waiting = ""  # special tokens behind a character that is not finished
        self._ids: list[int] = []  # tokens of the window: a piece handed out, then the undecided ones
        self._read = 0  # how many of them are already in `_prefix`
        self._prefix = ""  # decoding of `_ids[:_read]`
        self.stopped = False
        """True once a stop string was completed; later tokens give no text."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that has become certain, often an empty string."""
        if self.stopped:
            return ""
        token = self._tokenizer.token(token_id)
        if token is None:  # a row of the model without a token: it does not even end a run of byte tokens
            return ""
        if token in self._hidden:
            return self._push_special(token) if self._stop.special else ""
        self._ids.append(int(token_id))
        if token_id in self._byte_ids:
            return ""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if text.endswith(_UNKNOWN) or not text.startswith(self._prefix):
            return ""
        return self._release(self._advance(text))

    def _push_special(self, token: str) -> str:
        """It ends a run of byte tokens, and stands behind a character that is not finished."""
        self._waiting += token
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if not text.endswith(_UNKNOWN) and text.startswith(self._prefix):
            return self._release(self._advance(text))
        ended = copy(self._stop)  # were this the end
        piece = ended.take(text[len(self._prefix) :]) + ended.take(self._waiting, hidden=True)
        if not ended.stopped:
            return ""
        self._stop, self.stopped = ended, True
        return piece

    def hold(self, token_id: int) -> str:
        """Take one token whose text nobody waits for: `finish` gives all of it. Not with stop strings."""
        if self._tokenizer.token(token_id) not in self._hidden:
            self._ids.append(int(token_id))
        return ""

    def finish(self) -> str:
        """No more tokens will come: return the rest."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        piece = self._release(text[len(self._prefix) :])
        return piece if self.stopped else piece + self._stop.rest()

    def _advance(self, text: str) -> str:
        piece = text[len(self._prefix) :]
        if piece:
            # The last piece stays as the left context of the next one: decoders treat the first token
            # of a sequence differently (Metaspace drops its space).
            self._ids = self._ids[self._read :]
            if len(self._ids) == 1:
                self._prefix = self._tokenizer.alone(self._ids[0])
            else:
                self._prefix = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        self._read = len(self._ids)
        return piece

    def _release(self, piece: str) -> str:
        if not self._stop.texts:
            return piece
        text = self._stop.take(piece)
        if self._waiting:
            text += self._stop.take(self._waiting, hidden=True)
            self._waiting = ""
        self.stopped = self._stop.stopped
        return text
