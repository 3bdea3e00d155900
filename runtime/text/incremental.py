"""Streaming detokenizer: hands out text as soon as no later token can change it."""

from __future__ import annotations

from collections.abc import Iterable

from .tokenizer import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Decodes token by token; the pieces joined equal the decoding of all tokens at once.

    Held back until certain: the bytes of an unfinished character, a run of byte-fallback tokens (one bad byte
    at its end turns the whole run into replacement characters), and a tail that may become a stop string.
    Each step decodes a window of two pieces, never the whole output: the cost per token is constant.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._byte_ids = tokenizer, tokenizer.byte_ids
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []  # tokens of the window: a piece handed out, then the undecided ones
        self._read = 0  # how many of them are already in `_prefix`
        self._prefix = ""  # decoding of `_ids[:_read]`
        self._tail = ""  # certain text, held back as a possible beginning of a stop string
        self.stopped = False
        """True once a stop string was completed; later tokens give no text."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that has become certain, often an empty string."""
        if self.stopped or token_id in self._hidden:
            return ""
        self._ids.append(int(token_id))
        if token_id in self._byte_ids:
            return ""
        text = self._tokenizer.backend.decode(self._ids, skip_special_tokens=False)
        if text.endswith(_UNKNOWN) or not text.startswith(self._prefix):
            return ""
        return self._release(self._advance(text), final=False)

    def hold(self, token_id: int) -> str:
        """Take one token whose text nobody waits for: `finish` gives all of it. Not with stop strings."""
        if token_id not in self._hidden:
            self._ids.append(int(token_id))
        return ""

    def finish(self) -> str:
        """No more tokens will come: return the rest."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return self._release(text[len(self._prefix) :], final=True)

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

    def _release(self, piece: str, final: bool) -> str:
        if not self._stop:
            return piece
        text = self._tail + piece
        # The one completed first wins: that does not depend on where tokens begin and end.
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._tail = True, ""
            return text[: min(ends)[1]]
        keep = 0 if final else self._possible_stop(text)
        cut = len(text) - keep
        self._tail = text[cut:]
        return text[:cut]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
