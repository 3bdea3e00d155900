"""Drafting until the draft is unsure, by a threshold that follows what was accepted (Zhang et al., Draft & Verify, arXiv
2309.08168, section 3.4; constants as published with the paper, github.com/dilab-zju/self-speculative-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..common.validation import integer, number
from ..sampling.verify import Verdict
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..speculative.sequence import Sequence

LONGEST = 8
"""Most drafted tokens of a cycle."""

FIRST, FIRST_SAMPLED = 0.8, 0.5
"""Thresholds of a request's first cycle: greedy, and above temperature 0."""

WANTED = 0.9
"""Acceptance below which the threshold rises."""

MEMORY, STEP, KEPT = 0.5, 0.01, 0.9
"""Of the acceptance so far what a cycle keeps; of the threshold how far a cycle would move it, and what it keeps: the paper's
beta 1, epsilon and beta 2."""


class Threshold(NamedTuple):
    """`acceptance` is a moving average of accepted of drafted tokens, by cycle; `gamma` the threshold."""

    acceptance: float
    gamma: float


def updated(before: Threshold, accepted: int, drafted: int, longest: int) -> Threshold:
    """After a cycle in which the first `accepted` of `drafted` ≥ 1 tokens were right, of at most `longest`.

    Too few were right: drafting should stop earlier. Enough were: later, unless it was not the threshold that stopped it.
    """
    acceptance = MEMORY * before.acceptance + (1 - MEMORY) * accepted / drafted
    if acceptance < WANTED:
        aim = before.gamma + STEP
    else:
        aim = before.gamma if drafted == longest else before.gamma - STEP
    return Threshold(acceptance, KEPT * before.gamma + (1 - KEPT) * aim)


@dataclass
class AdaptiveThreshold:
    """The policy of one request: chains of at most `longest` tokens, ended by one that is less likely than the threshold.

    It is for drafts that know how likely their tokens are; another's chains are as long as they may be. A policy that
    several requests share follows what all of them accepted. Raises `OptionError` for values out of range.
    """

    longest: int = LONGEST
    threshold: float = FIRST
    needs_confidence = True

    def __post_init__(self) -> None:
        self.longest = integer("draft_length", self.longest, 0)
        gamma = number("confidence_threshold", self.threshold, 0, 1)
        self.state = Threshold(0.0, gamma)
        self._budget = Budget.chain(self.longest)

    def allot(self, sequences: Items[Sequence]) -> list[Budget]:
        return [self._budget] * len(sequences)

    def keep_drafting(self, confidence: float) -> bool:
        return confidence >= self.state.gamma

    def observe(self, sequence: Sequence, proposed: int, verdict: Verdict) -> None:
        """Move the threshold; a cycle without a proposal says nothing."""
        if proposed:
            self.state = updated(self.state, len(verdict.path), proposed, self.longest)
