"""How many tokens to draft. A policy is asked before each cycle, while drafting, and told the outcome.

Policies may use what was drafted and accepted, never the clock: output is a function of (request, seed), and so
is the sequence of pass widths.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..common.errors import OptionError
from ..common.validation import integer, number
from ..sampling.verify import Verdict
from ..speedup.budget import Budget

if TYPE_CHECKING:
    from ..speculative.sequence import Sequence


class DraftPolicy(Protocol):
    """Decides the draft length. A measured cost table fits here: `observe` collects acceptance by depth."""

    needs_confidence: bool
    """Whether `keep_drafting` looks at the probability; computing it costs a softmax per drafted token."""

    def allot(self, sequences: Items[Sequence]) -> list[Budget]:
        """Most to draft in the next cycle, for every sequence that shares this policy; `NOTHING` decodes plainly."""
        ...

    def keep_drafting(self, confidence: float) -> bool:
        """Whether to draft on after a token of this draft probability. The token itself is kept either way."""
        ...

    def observe(self, sequence: Sequence, proposed: int, verdict: Verdict) -> None:
        """The outcome of a cycle."""
        ...


def is_confident(confidence: float, threshold: float | None) -> bool:
    """Whether a token's draft probability reaches the threshold, where there is one."""
    return threshold is None or confidence >= threshold


def check_policy(policy: object) -> None:
    """Raise `OptionError` for what is no `DraftPolicy`, naming what it lacks."""
    lacks = [
        name for name in ("allot", "keep_drafting", "observe") if not callable(getattr(policy, name, None))
    ]
    lacks += [] if hasattr(policy, "needs_confidence") else ["needs_confidence"]
    if lacks:
        raise OptionError(f"policy: {policy!r:.80} is not a DraftPolicy: it has no {', '.join(lacks)}")


def allot_batch(policy: DraftPolicy, sequences: Items[Sequence]) -> list[Budget]:
    """What `policy` allots. Raises `OptionError` that names it where that is no `Budget` for each sequence."""
    budgets: object = policy.allot(sequences)
    if (
        isinstance(budgets, list | tuple)
        and len(budgets) == len(sequences)
        and all(isinstance(each, Budget) for each in budgets)
    ):
        return list(budgets)
    raise OptionError(
        f"policy: allot of {type(policy).__name__} gave {budgets!r:.80} for {len(sequences)} sequences, not a list of one "
        "Budget (vlmexport.runtime.speedup.budget) for each"
    )


@dataclass
class FixedLength:
    """Always `length` tokens; optionally stop after a token whose draft probability is below the threshold.

    `nodes` above `length` leave room for branches, for drafts that propose trees; None asks for a chain.
    """

    length: int
    confidence_threshold: float | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        self.length = integer("draft_length", self.length, 0)
        if self.confidence_threshold is not None:
            self.confidence_threshold = number("confidence_threshold", self.confidence_threshold, 0, 1)
        self.needs_confidence = self.confidence_threshold is not None
        nodes = self.length if self.nodes is None else integer("draft_nodes", self.nodes, 0)
        depth = min(self.length, nodes)
        self.budget = Budget(nodes if depth else 0, depth)

    def allot(self, sequences: Items[Sequence]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def keep_drafting(self, confidence: float) -> bool:
        return is_confident(confidence, self.confidence_threshold)

    def observe(self, sequence: Sequence, proposed: int, verdict: Verdict) -> None:
        """The length does not depend on the outcome."""
