"""How many tokens to draft. A policy is asked before each cycle, while drafting, and told the outcome.

Policies may use what was drafted and accepted, never the clock: output is a function of (request, seed), and so
is the sequence of pass widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ..errors import OptionError
from ..options import integer, number
from .acceptance import Verdict


class DraftPolicy(Protocol):
    """Decides the draft length. A measured cost table fits here: `observe` collects acceptance by depth."""

    needs_confidence: bool
    """Whether `keep_drafting` looks at the probability; computing it costs a softmax per drafted token."""

    def draft_length(self, emitted: int) -> int:
        """Most tokens to draft in the cycle that starts after `emitted` tokens; 0 decodes one token plainly."""
        ...

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to draft on after a token of this draft probability. The token itself is kept either way."""
        ...

    def observe(self, proposed: int, verdict: Verdict) -> None:
        """The outcome of a cycle."""
        ...


@dataclass
class FixedLength:
    """Always `length` tokens; optionally stop after a token whose draft probability is below the threshold."""

    length: int
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        self.length = integer("draft_length", self.length, 0)
        if self.confidence_threshold is not None:
            self.confidence_threshold = number("confidence_threshold", self.confidence_threshold, 0, 1)
        self.needs_confidence = self.confidence_threshold is not None

    def draft_length(self, emitted: int) -> int:
        return self.length

    def keep_drafting(self, confidence: float) -> bool:
        return self.confidence_threshold is None or confidence >= self.confidence_threshold

    def observe(self, proposed: int, verdict: Verdict) -> None:
        pass


@dataclass
class LogisticLength:
    """FastVLM eq. 5 (arXiv 2510.22641): d(t) = shortest + floor((longest − shortest) · σ(slope · (t − midpoint))).

    The paper uses 5, 15, 0.01 and half of the number of tokens to generate; floor keeps d below `longest` (the
    paper's range is therefore 5..14).
    """

    shortest: int = 5
    longest: int = 15
    midpoint: float = 64.0
    slope: float = 0.01
    needs_confidence = False

    def __post_init__(self) -> None:
        if not 0 <= self.shortest <= self.longest:
            raise OptionError(f"draft length range {self.shortest}..{self.longest} is empty or negative")

    def draft_length(self, emitted: int) -> int:
        exponent = max(-700.0, min(700.0, self.slope * (emitted - self.midpoint)))
        return self.shortest + math.floor((self.longest - self.shortest) / (1 + math.exp(-exponent)))

    def keep_drafting(self, confidence: float) -> bool:
        return True

    def observe(self, proposed: int, verdict: Verdict) -> None:
        pass
