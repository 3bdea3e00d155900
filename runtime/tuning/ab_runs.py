"""Ways of decoding side by side: plain, or a draft under one budget, with what the same requests took in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..speedup.budget import Budget
from ..speedup.predict import AcceptanceCounts
from ..speedup.stats import Stats

if TYPE_CHECKING:
    from ..session.result import Result
    from ..session.session import Session

WARM = 1.0
"""Seconds of decoding after which a request needs no other before it: it has filled the processor's caches itself."""


def decode(
    session: Session,
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    max_new_tokens: int,
    repeats: int = 2,
) -> Result:
    """The last of `repeats` decodings in a row, for which the processor's caches hold what it needs, as they do where one
    draft serves a robot; an earlier one where it took long (WARM)."""
    while True:
        result = session.generate(**request, max_new_tokens=max_new_tokens, **options)
        repeats -= 1
        if repeats < 1 or result.stats.decode_seconds > WARM:
            return result


class Turn(NamedTuple):
    """One request, decoded plainly and just after that in another way: a machine that is slow for some seconds is so for
    both."""

    request: int
    """Its number: the same request may have several turns."""
    plain: Stats
    other: Stats


def speedup(turns: Sequence[Turn]) -> float:
    """Of the other way over plain decoding, all turns together."""
    return sum(t.plain.decode_seconds for t in turns) / sum(t.other.decode_seconds for t in turns)


def tokens_per_cycle(turns: Sequence[Turn]) -> float:
    """Tokens that a cycle of the other way kept, bonus included, all turns together."""
    return sum(t.other.tokens - t.other.requests for t in turns) / sum(t.other.cycles for t in turns)


def by_request(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each request: what is independent of each other."""
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.request, []).append(turn)
    return list(groups.values())


@dataclass
class Arm:
    """One draft under one budget; plain decoding without either."""

    draft: str | None = None
    budget: Budget | None = None
    decoded: list[Stats] = field(default_factory=list)
    """Of requests that were decoded in all arms in turn."""
    turns: list[Turn] = field(default_factory=list)
    """Of requests that were decoded beside plain decoding."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Session.generate`."""
        if self.draft is None or self.budget is None:
            return {"speculative": False}
        nodes = self.budget.nodes if self.budget.nodes > self.budget.depth else None
        return {"draft": self.draft, "draft_length": self.budget.depth, "draft_nodes": nodes}

    @property
    def cycle_seconds(self) -> tuple[float, float]:
        """(seconds of a cycle, those of them inside the engine; the latter 0 on an engine that does not count them)."""
        total = Stats.total(self.decoded)
        return total.decode_seconds / total.cycles, (total.engine_seconds or 0.0) / total.cycles

    @property
    def requests(self) -> int:
        """How many `observed` tells of."""
        return len(self._counted)

    @property
    def observed(self) -> AcceptanceCounts:
        """What the draft did, by its counters."""
        assert self.draft is not None and self.budget is not None, "plain decoding observes nothing"
        return AcceptanceCounts.of(self.draft, self.budget, Stats.total(self._counted))

    @property
    def _counted(self) -> list[Stats]:
        """Where it only had turns, every request's first: the same requests give the same counters."""
        return self.decoded or [turns[0].other for turns in by_request(self.turns)]

    @property
    def halves(self) -> tuple[list[Turn], list[Turn]]:
        """The turns of every second request, and those of the others: what one half is chosen by, the other may judge. A
        single request is in both."""
        even, odd = ([turn for turn in self.turns if turn.request % 2 == half] for half in (0, 1))
        return even or odd, odd or even
