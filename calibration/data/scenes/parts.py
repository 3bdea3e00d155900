"""Which words of a caption say what is there, which are a matter of style, and which belong to the plan."""

from __future__ import annotations

from collections.abc import Sequence

from .vocabulary import COLOURS
from .words import ARMS, DEPTHS, GAPS, KINDS, LANES, NUMBERS, PATTERNS, SIZES, TABLES, WALLS

PARTS = ("fact", "style", "plan")
_FUNCTION = {"a", "and", "at", "by", "in", "it", "of", "the", "with"}
_TABLES = (DEPTHS, GAPS, KINDS, PATTERNS, SIZES, TABLES, WALLS)
_FACTS = {
    w for table in _TABLES for phrases in table.values() for p in phrases for w in p.rstrip("-").split()
}
_FACTS |= {w for phrases in LANES for p in phrases for w in p.split()}
_FACTS |= {*COLOURS, *NUMBERS.values(), "left", "right"}
_FACTS -= _FUNCTION
_ARMS = [arm.split() for arm in ARMS]


def parts_of(words: Sequence[str]) -> list[str]:
    """One of `PARTS` for every word or mark of a caption, in order; all from the plan's first word on is "plan"."""
    words = list(words)
    starts = [at for at in range(len(words)) if any(words[at : at + len(arm)] == arm for arm in _ARMS)]
    plan_at = starts[0] if starts else len(words)
    return [
        "plan" if at >= plan_at else "fact" if word in _FACTS else "style" for at, word in enumerate(words)
    ]
