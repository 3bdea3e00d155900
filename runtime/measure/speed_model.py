"""What speculation can gain: expected tokens per cycle, cost of a cycle, and the bound that follows.

Self-speculation with reuse of the trunk's rows: one cycle of d drafts costs
d · (trunk(1) + draft head) + trunk(1) + tail(d + 1), and emits 1 + α₁ + α₁α₂ + … tokens
(Leviathan et al., arXiv 2211.17192, theorem 3.8, with acceptance per depth; for one α it is
(1 − α^(d+1)) / (1 − α)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds of the passes that decoding is made of, engine only, at one cache length.

    `plain[q]`, `tail[q]`: all layers, and the layers after the trunk, over q new positions, head included;
    `trunk`: embedding and trunk over one position; `propose`: imitation network (if any) and head over one row.
    """

    plain: Mapping[int, float]
    tail: Mapping[int, float]
    trunk: float
    propose: float


def expected_tokens(alpha_by_depth: Sequence[float], draft_length: int) -> float:
    """Tokens per cycle, bonus token included, when draft k is accepted with probability alpha_by_depth[k − 1].

    Depths beyond the list take its last entry.
    """
    if draft_length and not alpha_by_depth:
        raise ValueError("no acceptance was measured")
    total = survival = 1.0
    for depth in range(draft_length):
        survival *= alpha_by_depth[min(depth, len(alpha_by_depth) - 1)]
        total += survival
    return total


def cycle_seconds(costs: Costs, draft_length: int) -> float:
    """Seconds of one draft-and-verify cycle of `draft_length` tokens."""
    drafting = draft_length * (costs.trunk + costs.propose)
    # The last draft passes the trunk too, so that the tail sees d + 1 rows.
    return drafting + costs.trunk + costs.tail[draft_length + 1]


def speedup_bound(costs: Costs, alpha_by_depth: Sequence[float], draft_length: int) -> float:
    """Decode speed-up over width-1 decoding if nothing but the graphs took time."""
    return expected_tokens(alpha_by_depth, draft_length) * costs.plain[1] / cycle_seconds(costs, draft_length)
