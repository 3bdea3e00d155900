"""The hidden authors: each has habits of wording, so what was written tells how it will go on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from .words import SLOTS

AUTHORS = 24
_HABIT_SEED = 5
_CONCENTRATION = 0.35  # of the Dirichlet: an author mostly uses one or two words of a slot
_FREE = 0.06  # share of the time that an author picks anything

_cache: dict[tuple[str, int], np.ndarray] = {}


def habits(slot: str, options: int) -> np.ndarray:
    """How often each author takes each option of a slot: float64 (AUTHORS, options), rows sum to 1.

    A slot's habits depend on its name alone, so that a new slot leaves the others as they are.
    """
    if (slot, options) not in _cache:
        rng = np.random.default_rng([_HABIT_SEED, zlib.crc32(slot.encode())])
        drawn = rng.dirichlet(np.full(options, _CONCENTRATION), AUTHORS)
        _cache[slot, options] = drawn * (1 - _FREE) + _FREE / options
    return _cache[slot, options]


class Pen:
    """Draws one author's words and keeps the exact probability of what it drew under every author.

    Different draws give different texts (tested), so the probability of a text is that of its draws.
    """

    def __init__(self, key: Sequence[int]) -> None:
        """`key`: non-negative integers; the same key draws the same words."""
        rng = np.random.default_rng([*key, 101])
        self.author = int(rng.integers(AUTHORS))
        self._uniforms = iter(rng.random(160).tolist())
        self._evidence = np.zeros(AUTHORS)

    @property
    def nats(self) -> float:
        """-log of the probability of all draws so far, summed over the authors."""
        top = float(self._evidence.max())
        return -(top + math.log(float(np.exp(self._evidence - top).mean())))

    def pick(self, slot: str, options: Sequence[str] | None = None) -> str:
        """One option of a slot (`words.SLOTS`, or `options` in its place) by the author's habit."""
        words = SLOTS[slot] if options is None else options
        return words[self._choose(habits(slot, len(words)))]

    def among(self, slot: str, allowed: Sequence[str]) -> str:
        """As `pick`, where only some of the slot's options are true of the scene."""
        places = [SLOTS[slot].index(word) for word in allowed]
        weights = habits(slot, len(SLOTS[slot]))[:, places]
        return allowed[self._choose(weights / weights.sum(1, keepdims=True))]

    def evenly(self, options: Sequence[int]) -> int:
        """One of several equals; no author prefers any."""
        return options[self._choose(np.full((AUTHORS, len(options)), 1 / len(options)))]

    def _choose(self, weights: np.ndarray) -> int:
        choice = self._draw(weights)
        self._evidence += np.log(weights[:, choice])
        return choice

    def _draw(self, weights: np.ndarray) -> int:
        mine, at = next(self._uniforms), 0
        for weight in weights[self.author].tolist():
            mine -= weight
            if mine < 0:
                return at
            at += 1
        return at - 1
