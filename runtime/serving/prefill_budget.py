"""How much of the prompts that begin goes through the model between two cycles of those who decode."""

from __future__ import annotations

FILLING = 4
"""How much more an empty place costs than a request that stands still: cycles take hardly longer with more requests."""


class PrefillBudget:
    """Counts the parts of prompts between two cycles, and what each sort of part takes.

    A batch fills up fast, and one that is two thirds full stands still for `prefills_per_cycle` parts at most: so many
    of the sort that takes longest, or more that are shorter and together take no more time.
    """

    def __init__(self, prefills_per_cycle: int):
        self._prefills_per_cycle = prefills_per_cycle
        self._seconds: dict[str, float] = {}
        """What a part takes, by its sort: the mean of the last ones."""
        self._left, self._spent = 0, 0.0

    def begin(self, beginning: int, running: int) -> None:
        """Between two cycles of `running` requests, while `beginning` ones could begin."""
        self._left = self._prefills_per_cycle * max(1, FILLING * beginning // max(1, running))
        self._spent = 0.0

    def allows(self, part: str) -> bool:
        """Whether another part, of this sort, comes before the next cycle."""
        longest = max(self._seconds.values(), default=0.0)
        expected = self._spent + self._seconds.get(part, longest)
        return self._left > 0 or expected <= longest * self._prefills_per_cycle

    def count(self, part: str, seconds: float) -> None:
        """A part of this sort took so long."""
        self._seconds[part] = seconds + 0.8 * (self._seconds.get(part, seconds) - seconds)
        self._left, self._spent = self._left - 1, self._spent + seconds
