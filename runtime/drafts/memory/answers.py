"""A memory of earlier answers: their tokens, the latest first to be believed, the oldest first to go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.atomic_files import write_file
from ...common.bounded_files import read_json
from ...common.errors import OptionError
from ...common.foreign_errors import raise_if_foreign
from ...common.validation import integer

if TYPE_CHECKING:
    from ...bundle.manifest import Manifest

FORMAT, VERSION = "vlmexport-memory", 1
MAX_TOKENS = 4096
"""Of all answers together: 100 to 200 of a robot's. Each answer that is kept has all of them sorted again."""
MOST_TOKENS = 1 << 20
LARGEST_FILE = 32 << 20
"""Bytes: `MOST_TOKENS` ids of 10 digits, with room between them."""
LARGEST = 1 << 31
"""Ids are below it, as a manifest's are."""

START = -1
"""Stands before each answer in `Corpus.tokens`, and behind the last one."""
FADING = 0.5
"""By how much less an answer is believed than the one after it."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Answers one behind the other, each behind a `START`: `tokens` int64 [n], and `weights` float64 [n], what the answer of
    a place is believed. It does not change."""

    tokens: np.ndarray
    weights: np.ndarray

    @cached_property
    def listed(self) -> list[int]:
        """`tokens`: one of a list is read several times as fast as one of an array."""
        return self.tokens.tolist()

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
        """Places by token, and between which of them those of a token are. Made at the first use, for all requests."""
        order = np.argsort(self.tokens, kind="stable")
        known, starts = np.unique(self.tokens[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        return order, dict(zip(known.tolist(), zip(starts.tolist(), ends, strict=True), strict=True))

    def places(self, token: int) -> np.ndarray:
        """int64 [k]: where a token stands, the latest answer first."""
        order, between = self._sorted
        first, end = between.get(token, (0, 0))
        return order[first:end]

    @classmethod
    def of(cls, answers: Sequence[Sequence[int]]) -> Corpus:
        """Of answers, the latest last."""
        tokens, lengths = [START], [1]
        for answer in reversed(answers):
            tokens += [*answer, START]
            lengths.append(len(answer) + 1)
        believed = np.r_[0.0, FADING ** np.arange(len(answers))]
        return cls(np.array(tokens, np.int64), np.repeat(believed, lengths))


def tokenizer_checksum(manifest: Manifest) -> str:
    """What tells a bundle's tokenizer from others: the checksum of its file."""
    return manifest.files[manifest.text.tokenizer].sha256


class Memory:
    """The answers that requests with this memory were given, of at most `max_tokens` tokens together. An answer that is
    given again is kept once. For any number of sessions and threads; all must be of one tokenizer.

    Nothing is written anywhere but by `save`.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        """Raises `OptionError` for another number than 1 to 1,048,576."""
        self._most = integer("max_tokens", max_tokens, 1, MOST_TOKENS)
        self._lock = threading.Lock()
        self._answers: dict[tuple[int, ...], None] = {}  # in the order in which they were last given
        self._tokens = 0
        self._tokenizer: str | None = None
        self._corpus: Corpus | None = None

    def __len__(self) -> int:
        """Answers that are remembered."""
        return len(self._answers)

    def __repr__(self) -> str:
        return f"Memory({len(self)} answers, {self._tokens} of {self._most} tokens)"

    def check(self, tokenizer: str) -> None:
        """Raises `OptionError` where the answers are of another tokenizer than that with this checksum."""
        known = self._tokenizer
        if known is not None and known != tokenizer:
            raise OptionError(
                "memory: its answers are tokens of another tokenizer; give each model a memory of its own, or `forget` them"
            )

    def remember(self, tokens: Iterable[int], tokenizer: str) -> None:
        """Keep an answer, as the latest one. One of more than `max_tokens` tokens is not kept. Raises `OptionError` as
        `check`."""
        answer = tuple(tokens)
        with self._lock:
            self.check(tokenizer)
            if not answer or len(answer) > self._most:
                return
            self._tokenizer, self._corpus = tokenizer, None
            if answer in self._answers:
                del self._answers[answer]
                self._tokens -= len(answer)
            self._answers[answer] = None
            self._tokens += len(answer)
            while self._tokens > self._most:
                oldest = next(iter(self._answers))
                del self._answers[oldest]
                self._tokens -= len(oldest)

    def forget(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._answers.clear()
            self._tokens, self._tokenizer, self._corpus = 0, None, None

    def corpus(self) -> Corpus:
        """What is remembered now; later answers do not change it."""
        with self._lock:
            if self._corpus is None:
                self._corpus = Corpus.of(list(self._answers))
            return self._corpus

    def save(self, path: Path | str) -> None:
        """Write the answers to a file, as token ids, in place of an older one. Raises `OSError`."""
        with self._lock:
            document = {
                "format": FORMAT,
                "version": VERSION,
                "tokenizer": self._tokenizer,
                "max_tokens": self._most,
                "answers": [list(answer) for answer in self._answers],
            }
        write_file(Path(path), json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Memory:
        """The memory that `save` wrote. Raises `OptionError` for another file, `OSError` for one that cannot be read."""
        document = read_json(Path(path), LARGEST_FILE, OptionError)
        try:
            return cls._parse(document)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise_if_foreign(error)
            raise OptionError(
                f"memory {path}: is not a memory of vlmexport; `Memory.save` writes one"
            ) from error

    @classmethod
    def _parse(cls, document: Any) -> Memory:
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise ValueError("another format")
        memory, tokenizer = cls(document["max_tokens"]), document["tokenizer"]
        for answer in document["answers"]:
            if not isinstance(tokenizer, str) or not all(type(t) is int and 0 <= t < LARGEST for t in answer):
                raise ValueError("no tokens")
            memory.remember(answer, tokenizer)
        return memory
