"""What a request changes of logits where they lie on a device: repetition penalty and suppressed tokens, by the graph `process`.

Marks of tokens that were seen stay on the device from cycle to cycle, each of which brings the tokens emitted since the one
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engines.base import Call, Engine, View

GRAPH = "process"


@dataclass(frozen=True, eq=False)
class Changes:
    """Of one request; the same object for as long as it runs."""

    penalty: float
    """Above 1: what was seen becomes less likely."""
    banned: np.ndarray
    """int64 [n]: tokens that never come."""
    history: Sequence[int]
    """Tokens before the one that a cycle begins with, and that one; it grows."""


class Processing:
    """The graph `process` of a decoder, and the marks that it reads."""

    def __init__(self, engine: Engine, vocabulary: int, most: int):
        """`most`: tokens that a cycle may emit, and nodes of its tree."""
        self._engine, self._vocabulary, self._most = engine, vocabulary, most
        rows = vocabulary * most
        self._seen = self._floats("process.seen", vocabulary)
        self._now = self._floats("process.seen_now", vocabulary)
        self._raw = self._floats("process.raw_logits", rows)
        self._logits = self._floats("process.logits", rows)
        self._penalty = self._floats("process.penalty", 1)
        self._banned = engine.allocate("process.banned", vocabulary).view((vocabulary,), "bool")
        self._marked: tuple[Changes, int] | None = None
        """Whose tokens the marks are of, and how many of its history they know."""

    @property
    def recent(self) -> int:
        """How many tokens a cycle brings."""
        return self._most

    def begin(self, changes: Changes) -> list[int]:
        """The `recent` tokens that the next cycle of a request brings; what else the graph reads of it is written where the
        marks are another request's."""
        known, self._marked = self._marked, None
        history, wanted = changes.history, len(changes.history)
        if known is None or known[0] is not changes or wanted - known[1] > self._most:
            seen, banned = np.zeros(self._vocabulary, np.float32), np.zeros(self._vocabulary, np.bool_)
            seen[[token for token in history if token < self._vocabulary]] = 1.0
            banned[changes.banned] = True
            self._engine.write(self._seen, seen)
            self._engine.write(self._banned, banned)
            self._engine.write(self._penalty, np.array([changes.penalty], np.float32))
            fresh: list[int] = []
        else:
            fresh = list(history[known[1] :])
        return fresh + [history[-1]] * (self._most - len(fresh))

    def done(self, changes: Changes) -> None:
        """The cycle that brought the tokens has run: the marks know them."""
        self._marked = changes, len(changes.history)

    def raw(self, rows: int) -> View:
        """Where a head leaves logits [rows, V] for the graph."""
        return self._raw.buffer.view((rows, self._vocabulary), "float32")

    def call(self, recent: View, tokens: View, ancestors: View, best: View) -> Call:
        """Logits of `raw` → `best` int64 [rows] after the changes. `recent` int64 [recent], `tokens` int64 [span],
        `ancestors` bool [rows, span]."""
        rows = ancestors.shape[0]
        inputs = {
            "raw_logits": self.raw(rows), "seen": self._seen, "banned": self._banned, "penalty": self._penalty,
            "recent": recent, "tokens": tokens, "ancestors": ancestors,
        }  # fmt: skip
        outputs = {"best": best, "logits": self._logits.buffer.view(inputs["raw_logits"].shape, "float32")}
        return self._engine.bind(GRAPH, inputs, outputs | {"seen_now": self._now})

    def keep(self) -> Call:
        """What makes the marks of the last call those that the next cycle finds."""
        return self._engine.copy(self._seen, self._now)

    def _floats(self, name: str, count: int) -> View:
        return self._engine.allocate(name, count * 4).view((count,), "float32")
