"""Which pairs of a prompt a ViSpec layer runs, and what of its pictures it sees there (arXiv 2509.15235, section 3.1).

A picture at positions start..end − 1 is the next token of pairs start − 1..end − 2: these are left out, and the
picture's tokens stand at the last of their positions. Text keeps its positions, and every pair from end − 1 on knows
the picture's global feature, until the next picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Seen:
    """A picture, or one frame of a video, at positions start..end − 1: `tokens` [n, E], and the `feature` [E] that text
    behind it knows."""

    start: int
    end: int
    tokens: np.ndarray
    feature: np.ndarray

    @property
    def pairs(self) -> range:
        """Positions of the pairs whose next token it is."""
        return range(max(self.start - 1, 0), self.end - 1)

    @property
    def shown(self) -> np.ndarray:
        """The tokens that have a place: of a picture with fewer pairs the last ones."""
        count = min(len(self.tokens), len(self.pairs))
        return self.tokens[len(self.tokens) - count :]

    @property
    def dropped(self) -> range:
        """Positions of the pairs that nothing stands for."""
        return range(self.pairs.start, self.pairs.stop - len(self.shown))


@dataclass(frozen=True)
class Pair:
    """A pair that is run: its position, and the picture's token that stands there (`compressed`) or the global feature
    that it knows; None before the first picture."""

    position: int
    visual: np.ndarray | None
    compressed: bool = False


def pairs_of(pictures: Sequence[Seen], first: int, end: int) -> list[Pair]:
    """Of pairs first..end − 1 of a prompt those that are run; `pictures` in the order of their positions."""
    pairs: list[Pair] = []
    at, feature = first, None
    for picture in pictures:
        place = picture.pairs
        pairs += [Pair(position, feature) for position in range(at, min(place.start, end))]
        behind = place.stop - len(picture.shown)
        pairs += [
            Pair(position, token, True)
            for position, token in enumerate(picture.shown, behind)
            if first <= position < end
        ]
        at, feature = max(at, place.stop), picture.feature
    return pairs + [Pair(position, feature) for position in range(at, end)]


def slots_before(pictures: Sequence[Seen], position: int) -> int:
    """How many pairs before `position` are run."""
    left_out = (min(position, picture.dropped.stop) - picture.dropped.start for picture in pictures)
    return position - sum(max(0, count) for count in left_out)
