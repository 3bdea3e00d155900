"""Acceptance of a draft by depth, from counts that fade."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ..speedup.predict import ChainCounts

SEEN_WEIGHT = 40.0
"""Judged tokens that what `tune` saw of a draft counts as, at its first depth. A guess would give up a good draft whose
first proposals of a request happen to be wrong."""


class Acceptance:
    """Accepted and evaluated tokens by depth, fading with every drafted cycle."""

    def __init__(self, memory: float, seen: ChainCounts | None = None):
        """`seen` counts as `SEEN_WEIGHT` tokens at most, so that other requests than those are soon believed."""
        self._keep = 1 - 1 / memory
        self._accepted: list[float] = []
        self._evaluated: list[float] = []
        if seen is not None and (most := max(seen.evaluated, default=0)):  # else nothing was judged
            part = min(1.0, SEEN_WEIGHT / most)
            self._accepted = [part * count for count in seen.accepted]
            self._evaluated = [part * count for count in seen.evaluated]

    def add(self, accepted: int, evaluated: int) -> None:
        """One drafted cycle: the first `accepted` of `evaluated` tokens were right."""
        keep = self._keep
        while len(self._evaluated) < evaluated:
            self._accepted.append(0.0)
            self._evaluated.append(0.0)
        for depth in range(len(self._evaluated)):
            self._accepted[depth] = keep * self._accepted[depth] + (depth < accepted)
            self._evaluated[depth] = keep * self._evaluated[depth] + (depth < evaluated)

    def rates(self, prior: Items[float], weight: float) -> list[float]:
        """Acceptance by depth, as many as in `prior`, each shrunk towards the mean of its prior and of the depth above.

        The depth above matters: a depth that is not drafted any more follows it, and so is tried again when it pays.
        """
        rates: list[float] = []
        above, known = prior[0], len(self._evaluated)
        for depth, expected in enumerate(prior):
            above = (expected + above) / 2
            if depth < known:
                above = (self._accepted[depth] + weight * above) / (self._evaluated[depth] + weight)
            rates.append(above)
        return rates
