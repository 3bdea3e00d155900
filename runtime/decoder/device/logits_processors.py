"""What a request changes of logits where they lie on a device, by the graphs `penalties` and `repeats`.

The text stays on the device from cycle to cycle (`graphs/text_layout.py`), each of which brings its last tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...bundle.manifest import Limits
from ...engines.base import DTYPES, Call, Engine, View
from ...graphs.text_layout import CONTEXT, NOTHING, WORDS, TextLayout, valid_ids

NEVER = CONTEXT + 1
"""So many tokens before a place are never compared: what lies there is never forbidden."""


@dataclass(frozen=True, eq=False)
class LogitsChanges:
    """Of one request; the same object for as long as it runs."""

    penalty: float
    """Above 1: what was seen becomes less likely."""
    banned: np.ndarray
    """int64 [n]: tokens that never come."""
    history: Sequence[int]
    """Tokens before the one that a cycle begins with, and that one; it grows."""
    ends: np.ndarray
    """int64 [n]: tokens that do not come behind a shorter text than `opens`."""
    opens: int
    ngram: int
    """Of how many tokens no sequence comes twice; 0: any may."""
    words: Sequence[tuple[int, ...]]
    """Of two tokens or more, none of which comes."""

    @property
    def fits(self) -> bool:
        """Whether a device has room to look for all of it."""
        longest = max([self.ngram, *map(len, self.words)])
        return longest <= CONTEXT + 1 and sum(map(len, self.words)) <= WORDS

    @property
    def graph(self) -> str:
        """Which graph does it."""
        return "repeats" if self.ngram or self.words else "penalties"


class DeviceLogitsProcessors:
    """Both graphs of a decoder, and the text that they read."""

    def __init__(self, engine: Engine, limits: Limits, vocabulary: int):
        self._engine, self._vocabulary, self._most = engine, vocabulary, limits.max_width
        self._layout = layout = TextLayout.of(limits)
        count = vocabulary * self._most
        self._kept = {
            "said": self._allocate("said", layout.places),
            "needed": self._allocate("needed", layout.compared),
            "penalty": self._allocate("penalty", 1, "float32"),
            "banned": self._allocate("banned", vocabulary, "bool"),
            "ends": self._allocate("ends", vocabulary, "bool"),
        }
        self._now = self._allocate("said_now", layout.places)
        self._raw = self._allocate("raw_logits", count, "float32")
        self._logits = self._allocate("logits", count, "float32")
        self._known: tuple[LogitsChanges, int] | None = None
        """Whose text lies there, and how many of its tokens."""

    @property
    def sent(self) -> dict[str, int]:
        """What a cycle brings: int64, so many of each."""
        return {"recent": self._most, "end": 1, "held": 1}

    def begin(self, changes: LogitsChanges) -> dict[str, np.ndarray]:
        """What the next cycle of a request brings (`sent`); what else the graphs read of it is written where another's
        lies."""
        known, self._known = self._known, None
        if known is None or known[0] is not changes or len(changes.history) - known[1] > self._most:
            for name, values in of_request(changes, self._layout, self._vocabulary).items():
                self._engine.write(self._kept[name], values)
        return of_cycle(changes, self._layout, self._vocabulary, self._most)

    def done(self, changes: LogitsChanges) -> None:
        """The cycle that brought the tokens has run: the text has them."""
        self._known = changes, len(changes.history)

    def raw(self, num_logits: int) -> View:
        """Where a head leaves logits [num_logits, V] for a graph."""
        return self._raw.buffer.view((num_logits, self._vocabulary), "float32")

    def call(self, graph: str, sent: Mapping[str, View], nodes: Mapping[str, View], best: View) -> Call:
        """Logits of `raw` → `best` int64 [num_logits] after the changes. `nodes`: `depths` int64 [num_logits], `tokens`
        and `token_depths` int64 [span], `ancestors` bool [num_logits, span]."""
        (num_logits,) = best.shape
        names = {value.name for value in self._engine.interface(graph).inputs}
        inputs = {name: view for name, view in self._kept.items() if name in names}
        inputs |= {"raw_logits": self.raw(num_logits), **sent, **nodes}
        outputs = {"best": best, "logits": self._logits.buffer.view(inputs["raw_logits"].shape, "float32")}
        return self._engine.bind(graph, inputs, outputs | {"said_now": self._now})

    def keep(self) -> Call:
        """What makes the text of the last call that which the next cycle finds."""
        return self._engine.copy(self._kept["said"], self._now)

    def _allocate(self, name: str, count: int, dtype: str = "int64") -> View:
        nbytes = count * DTYPES[dtype].itemsize
        return self._engine.allocate(f"process.{name}", nbytes).view((count,), dtype)


def of_request(changes: LogitsChanges, layout: TextLayout, vocabulary: int) -> dict[str, np.ndarray]:
    """What the graphs read of a request, with the text as it is now."""
    said = np.full(layout.places, NOTHING, np.int64)
    said[layout.lead : layout.lead + len(changes.history)] = valid_ids(changes.history, vocabulary)
    needed = np.full(layout.compared, NEVER, np.int64)
    if changes.ngram:
        needed[: layout.room] = changes.ngram - 1
    place = layout.first_word
    for word in changes.words:
        said[place : place + len(word)] = valid_ids(word, vocabulary)
        place += len(word)
        needed[place - 1 - layout.lead] = len(word) - 1
    banned, ends = np.zeros((2, vocabulary), np.bool_)
    for flags, ids in ((banned, changes.banned), (ends, changes.ends)):
        flags[ids[ids < vocabulary]] = True
    penalty = np.array([changes.penalty], np.float32)
    return {"said": said, "needed": needed, "penalty": penalty, "banned": banned, "ends": ends}


def of_cycle(changes: LogitsChanges, layout: TextLayout, vocabulary: int, most: int) -> dict[str, np.ndarray]:
    """What they read of one cycle: its `most` last tokens, where the last one lies, and how far behind it no text
    ends."""
    last = valid_ids(changes.history[-most:], vocabulary)
    recent = np.full(most, NOTHING, np.int64)
    recent[most - len(last) :] = last
    length = len(changes.history)
    return {
        "recent": recent, "end": np.array([layout.lead + length - 1]), "held": np.array([changes.opens - length]),
    }  # fmt: skip
