"""A clock that reads a cost table instead of the time: what recorded cycles take, against plain decoding.

It says the same on every machine, and is not disturbed by other work.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..speedup.cost_model import CostTable
from ..speedup.stats import Stats


@dataclass(frozen=True)
class Reading:
    """Seconds of decoding by the table, and of decoding the same tokens plainly."""

    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Above 1 when speculation gained; 1 when nothing was decoded."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    def __add__(self, other: Reading) -> Reading:
        return Reading(self.seconds + other.seconds, self.plain_seconds + other.plain_seconds)


def decoding(table: CostTable, draft: str, stats: Stats) -> Reading:
    """One request, or a `Stats.total`, decoded one sequence at a time. Tokens that were discarded do not count."""
    seconds = sum(
        count * table.cycle_seconds(draft, depth, nodes) for (nodes, depth), count in stats.shapes.items()
    )
    return Reading(seconds, max(0, stats.tokens - stats.requests) * table.token_seconds())
