"""What a model's `generation_config` asks of decoding: logits changed by the tokens before them.

The counterpart of the classes in transformers' `generation/logits_process.py` (5.23), in the order in which its
`generate` applies them: repetition penalty, repeated n-grams, bad words, minimum length, minimum number of new tokens,
suppressed tokens, tokens suppressed at the beginning. Every step after the first only sets logits to −inf. The grammar of
a request comes last, and has the last word: where the steps before it leave none of the tokens that it allows, they do not
count.

A token depends on the logits after exactly the tokens before it. In a tree these are the history (the prompt and what
was emitted) and the path to a node, so that the same change applies to the same token in plain decoding and in any tree:
verification stays lossless. The history of a decoder-only model is the prompt's ids, image placeholders included (as
transformers sees them: BLIP-2 with OPT passes its `input_ids` along with the embeddings); that of an encoder-decoder
model is what its decoder was prefilled with, not the encoder's prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..decoder.device.logits_processors import LogitsChanges

if TYPE_CHECKING:
    from ..bundle.manifest import GenerationInfo
    from ..grammars.matcher import GrammarMatcher


class Processors:
    """Logits processors of one request. It knows the history up to the last emitted token and grows with it.

    Costs of `apply`: one copy of the logits, and work in the number of distinct tokens of the history; repeated n-grams
    are looked up in a table. Both are brought up to the history's end when they are asked for: a device that changes
    logits by itself never asks.
    """

    def __init__(
        self,
        info: GenerationInfo,
        eos_token_ids: Iterable[int],
        prompt: Iterable[int],
        grammar: GrammarMatcher | None = None,
    ):
        ends = sorted({int(token) for token in eos_token_ids})
        words = _bad_words(info.bad_words_ids, ends)
        self._penalty = np.float32(info.repetition_penalty)
        self._penalised = info.repetition_penalty != 1.0
        self._size = info.no_repeat_ngram_size
        self._ends = np.asarray(ends, np.int64)
        self._always = _ids([*info.suppress_tokens, *(word[0] for word in words if len(word) == 1)])
        self._at_begin = _ids(info.begin_suppress_tokens)
        # One with a negative number never comes anyway.
        several = [word for word in words if len(word) > 1 and min(word) >= 0]
        self._words = [(word[:-1], word[-1]) for word in several]
        self.grammar = grammar
        self._history: list[int] = []
        self._distinct: set[int] = set()
        self._ids = np.empty(0, np.int64)
        self._ngrams: dict[tuple[int, ...], list[int]] = {}
        self._known = 0
        """So many tokens of the history are in both."""
        self._history += map(int, prompt)
        self._begin = len(self._history)
        self._open = 0  # length of the first history that may end
        if ends:
            self._open = max(info.min_length, self._begin + info.min_new_tokens if info.min_new_tokens else 0)
        changes = LogitsChanges(
            float(self._penalty), self._always, self._history, self._ends, self._open, self._size, several
        )
        self._changes = changes if changes.fits and grammar is None else None

    @classmethod
    def from_info(
        cls,
        info: GenerationInfo,
        eos_token_ids: Iterable[int],
        prompt: Iterable[int],
        grammar: GrammarMatcher | None = None,
    ) -> Processors | None:
        """The processors of a request, or None where nothing is asked for: then logits need not be looked at.

        `prompt`: token ids before the first new one (see the head of this file). `eos_token_ids`: the model's own, also
        where a request does not stop at them. `grammar`: what the answer must be, at its beginning.
        """
        processors = cls(info, eos_token_ids, prompt, grammar)
        return None if processors.idle else processors

    @property
    def idle(self) -> bool:
        """Whether no later logits can be changed (the tokens suppressed at the beginning are past, say)."""
        length = len(self._history)
        lasting = (
            self.grammar is not None
            or self._penalised
            or self._size > 0
            or self._always.size > 0
            or bool(self._words)
        )
        return not lasting and length >= self._open and (length > self._begin or self._at_begin.size == 0)

    @property
    def on_device(self) -> LogitsChanges | None:
        """What is asked for where a device does all of it: not tokens that are suppressed at the beginning, nor n-grams and bad
        words that it has no room for (`Changes.fits`)."""
        begins = len(self._history) == self._begin and self._at_begin.size > 0
        return None if begins else self._changes

    def extend(self, tokens: Iterable[int]) -> None:
        """Append emitted tokens to the history."""
        emitted = [int(token) for token in tokens]
        self._history += emitted
        if self.grammar is not None:
            self.grammar.extend(emitted)

    def apply(self, logits: np.ndarray, path: Sequence[int] = ()) -> np.ndarray:
        """Logits float32 [V] of the token after the history and `path`, from the model's logits [V] (not modified).

        `path`: the tokens of a tree from the one after the history to the node whose logits these are; empty for the
        node that holds the last token of the history. Raises `GrammarError` where a grammar lets no token follow.
        """
        self._catch_up()
        out = logits.astype(np.float32)  # always a copy
        path = [int(token) for token in path]
        length = len(self._history) + len(path)
        if self._penalised:
            self._penalise(out, path)
        for banned in self._banned(path, length):
            out[_inside(banned, out.size)] = -np.inf
        barred = None if self.grammar is None else self.grammar.barred(path, out.size)
        if barred is not None:
            np.copyto(out, -np.inf, where=barred)
            if out.max() == -np.inf:
                return np.where(barred, np.float32(-np.inf), logits.astype(np.float32))
        return out

    # --- private ---

    def _catch_up(self) -> None:
        """Note the distinct tokens and the n-grams of what was appended since the last time."""
        history, known, size = self._history, self._known, self._size
        self._known = len(history)
        if size > 0:
            for window in self._windows(history[max(0, known - size + 1) :]):
                self._ngrams.setdefault(window[:-1], []).append(window[-1])
        fresh = set(history[known:]) - self._distinct if self._penalised else ()
        if fresh:
            self._distinct |= fresh
            self._ids = np.concatenate([self._ids, np.fromiter(fresh, np.int64, len(fresh))])

    @np.errstate(all="ignore")
    def _penalise(self, out: np.ndarray, path: list[int]) -> None:
        fresh = set(path) - self._distinct
        ids = np.concatenate([self._ids, np.fromiter(fresh, np.int64, len(fresh))]) if fresh else self._ids
        ids = _inside(ids, out.size)
        scores = out[ids]
        out[ids] = np.where(scores < 0, scores * self._penalty, scores / self._penalty)

    def _banned(self, path: list[int], length: int) -> Iterable[np.ndarray]:
        """Arrays of token ids that may not follow the history and `path`."""
        if self._size > 0:
            yield _ids(self._repeating(path))
        if self._words:
            yield _ids(last for prefix, last in self._words if self._ends_with(prefix, path))
        if length < self._open:
            yield self._ends
        yield self._always
        if length == self._begin:
            yield self._at_begin

    def _repeating(self, path: list[int]) -> list[int]:
        """Tokens that would complete an n-gram of the history and `path` a second time."""
        context = self._size - 1
        tail = self._tail(context, path)
        if len(tail) < context:
            return []
        prefix = tuple(tail[len(tail) - context :])
        tokens = self._ngrams.get(prefix, [])
        return [*tokens, *(window[-1] for window in self._windows(tail) if window[:-1] == prefix)]

    def _windows(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The n-grams of these."""
        return [tuple(tokens[i : i + self._size]) for i in range(len(tokens) - self._size + 1)]

    def _tail(self, count: int, path: list[int]) -> list[int]:
        """Up to `count` last tokens of the history, then `path`."""
        return self._history[max(0, len(self._history) - count) :] + path

    def _ends_with(self, prefix: tuple[int, ...], path: list[int]) -> bool:
        tail = self._tail(len(prefix), path)
        return len(tail) >= len(prefix) and tuple(tail[len(tail) - len(prefix) :]) == prefix


def _bad_words(words: Iterable[Sequence[int]], ends: Sequence[int]) -> list[tuple[int, ...]]:
    """Each word once; without those that are the end of the sequence, which transformers takes out too."""
    return [word for word in dict.fromkeys(map(tuple, words)) if not (len(word) == 1 and word[0] in ends)]


def _ids(tokens: Iterable[int]) -> np.ndarray:
    """Token ids as int64 [n]; −1, which some configurations use for "none", is no token."""
    return np.asarray([token for token in tokens if token >= 0], np.int64)


def _inside(ids: np.ndarray, size: int) -> np.ndarray:
    """Those below `size`: an embedding table can have rows (image placeholders) that the head has not."""
    return ids[ids < size]
