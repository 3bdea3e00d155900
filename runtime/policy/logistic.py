"""FastVLM's length by position: deprecated here, and kept for one release for callers that pass it as `policy`.

It loses to any fixed length that suits the draft (docs/results/papers/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.errors import OptionError
from ..sampling.verify import Verdict
from ..speedup.budget import Budget
from .base import is_confident

if TYPE_CHECKING:
    from ..speculative.sequence import Sequence


@dataclass
class LogisticLength:
    """FastVLM eq. 5 (arXiv 2510.22641): d(t) = shortest + floor((longest − shortest) · σ(slope · (t − midpoint))).

    The paper uses 5, 15, 0.01 and half of the number of tokens to generate; floor keeps d below `longest` (the
    paper's range is therefore 5..14). Optionally a chain ends after a token whose draft probability is below the threshold.
    """

    shortest: int = 5
    longest: int = 15
    midpoint: float = 64.0
    slope: float = 0.01
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        self.needs_confidence = self.confidence_threshold is not None
        if not 0 <= self.shortest <= self.longest:
            raise OptionError(f"draft length range {self.shortest}..{self.longest} is empty or negative")

    @classmethod
    def of(cls, max_new_tokens: int, widest: int, threshold: float | None = None) -> LogisticLength:
        """The paper's, for a request of at most `max_new_tokens`; no chain is longer than `widest`."""
        shortest, longest = min(cls.shortest, widest), min(cls.longest, widest)
        return cls(shortest, longest, midpoint=max_new_tokens / 2, confidence_threshold=threshold)

    def allot(self, sequences: Items[Sequence]) -> list[Budget]:
        return [Budget.chain(self.draft_length(len(sequence.tokens))) for sequence in sequences]

    def draft_length(self, emitted: int) -> int:
        """d(t) of a cycle that starts after `emitted` tokens."""
        exponent = max(-700.0, min(700.0, self.slope * (emitted - self.midpoint)))
        return self.shortest + math.floor((self.longest - self.shortest) / (1 + math.exp(-exponent)))

    def keep_drafting(self, confidence: float) -> bool:
        return is_confident(confidence, self.confidence_threshold)

    def observe(self, sequence: Sequence, proposed: int, verdict: Verdict) -> None:
        """The length does not depend on the outcome."""
