"""What passes cost and what speculation gains from them: the one speed model of bench, controller and virtual clock.

A cycle of d drafted tokens emits 1 + α₁ + α₁α₂ + … tokens (Leviathan et al., arXiv 2211.17192, theorem 3.8, with
acceptance per depth; for one α it is (1 − α^(d+1)) / (1 − α)). It costs d · propose + T(d + 1) with a separate draft,
and d · (trunk + propose) + trunk + tail(d + 1) with self-speculation that reuses the trunk's hidden states. Seconds are
of the graphs, and of the host where that was measured. Everything here is a function of its arguments: no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


class Curve:
    """Seconds of a pass by its width: straight lines between the measured ones, never falling.

    Below the least measured width its time holds. Beyond the widest the line goes on with the larger of the last
    and the mean slope; a curve of one point grows in proportion. Raises `ValueError` without a positive time.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.measured = dict(sorted(seconds.items()))
        self._widths = list(self.measured)
        if not self._widths or self._widths[0] < 1 or min(self.measured.values()) <= 0:
            raise ValueError(f"{seconds!r} gives no time to any width")
        self._seconds: list[float] = []
        for value in self.measured.values():  # noise must not make a wider pass cheaper
            self._seconds.append(max(value, self._seconds[-1] if self._seconds else 0.0))
        first, last = self._widths[0], self._widths[-1]
        if first == last:
            self._slope = self._seconds[0] / first
        else:
            rise = self._seconds[-1] - self._seconds[-2]
            self._slope = max(
                rise / (last - self._widths[-2]), (self._seconds[-1] - self._seconds[0]) / (last - first)
            )

    def scaled(self, factor: float) -> Curve:
        """The same on a machine that takes `factor` times as long."""
        return Curve({width: factor * seconds for width, seconds in self.measured.items()})

    def __call__(self, width: int) -> float:
        """Seconds at `width` ≥ 1."""
        widths, seconds = self._widths, self._seconds
        at = bisect_left(widths, width)
        if at == len(widths):
            return seconds[-1] + (width - widths[-1]) * self._slope
        if at == 0 or widths[at] == width:
            return seconds[at]
        share = (width - widths[at - 1]) / (widths[at] - widths[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def between(points: Mapping[int, float], at: int) -> float:
    """On the straight line between the points beside `at`; that of the first or last one beyond them."""
    known = sorted(points)
    right = bisect_left(known, at)
    if right in (0, len(known)):
        return points[known[min(right, len(known) - 1)]]
    low, high = known[right - 1], known[right]
    return points[low] + (at - low) / (high - low) * (points[high] - points[low])


@dataclass(frozen=True)
class DraftCosts:
    """Seconds of a draft's own passes, one sequence. All zero for one that runs on the host (prompt lookup).

    `tail[q]`: the layers after the trunk over q positions, head included; None when the verifier runs all layers.
    `trunk`: embedding and trunk over one position. `propose`: what else one drafted token takes, its head included.
    `once`: what a proposal takes whatever its depth (heads that look several tokens ahead). `host`: what a drafted cycle
    takes outside the graphs; 0 where it was not measured. `tree_host[nodes]`: the same of a cycle that verifies a tree.
    """

    tail: Curve | None = None
    trunk: float = 0.0
    propose: float = 0.0
    once: float = 0.0
    host: float = 0.0
    tree_host: Mapping[int, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> DraftCosts:
        """The same where every pass takes `factor` times as long; the host's time is left as it is."""
        return replace(
            self,
            tail=None if self.tail is None else self.tail.scaled(factor),
            trunk=factor * self.trunk,
            propose=factor * self.propose,
            once=factor * self.once,
        )

    def extra_seconds(self, depth: int, nodes: int) -> float:
        """What a cycle of this shape takes outside the graphs."""
        return between(self.tree_host, nodes) if self.tree_host and nodes > depth else self.host


FREE = DraftCosts()
"""A draft that runs on the host."""


@dataclass(frozen=True)
class CostTable:
    """Pass times of one bundle on one machine. `plain[q]`: all layers over q new positions, head included.

    A batch of b sequences of width w is a pass over b · w positions. `host`: what a sequence takes outside the graphs in
    a plain cycle, and in a drafted one of a draft that does not say; 0 where it was not measured.
    """

    plain: Curve
    drafts: Mapping[str, DraftCosts] = field(default_factory=dict)
    host: float = 0.0
    least: int = 1
    """Positions of the narrowest pass of a sequence: a session's `verify_width`."""

    def scaled(self, factor: float) -> CostTable:
        """The same where every pass takes `factor` times as long; the host's time is left as it is."""
        drafts = {name: costs.scaled(factor) for name, costs in self.drafts.items()}
        return replace(self, plain=self.plain.scaled(factor), drafts=drafts)

    def token_seconds(self, batch: int = 1) -> float:
        """Seconds of one plain pass that gives every sequence of a batch one token."""
        return self.plain(batch * self.least) + batch * self.host

    def cycle_seconds(self, draft: str, depth: int, nodes: int | None = None, batch: int = 1) -> float:
        """Seconds of one cycle: `depth` drafting steps, then `nodes` drafted tokens (default: a chain) verified.

        Single-position passes of a batch cost as much more than one sequence's as the plain pass does.
        """
        nodes = depth if nodes is None else nodes
        width = nodes + 1
        if width == 1:
            return self.token_seconds(batch)
        costs = self.drafts.get(draft, FREE)
        host = batch * (costs.extra_seconds(depth, nodes) or self.host)
        wider = self.plain(batch) / self.plain(1)
        trunk = costs.trunk * self.plain(batch * self.least) / self.plain(1)
        drafting = (costs.once + depth * costs.propose) * wider + depth * trunk
        width = batch * max(width, self.least)
        if costs.tail is None:
            return host + drafting + self.plain(width)
        # The last draft passes the trunk too, so that the tail sees all of them.
        return host + drafting + trunk + costs.tail(width)

    def speedup(self, draft: str, alpha_by_depth: Sequence[float], depth: int, batch: int = 1) -> float:
        """Predicted decode speed of a chain over width-1 decoding of the same batch."""
        gained = expected_tokens(alpha_by_depth, depth)
        return gained * self.token_seconds(batch) / self.cycle_seconds(draft, depth, batch=batch)


def expected_tokens(alpha_by_depth: Sequence[float], depth: int) -> float:
    """Tokens per cycle, bonus token included, when draft k is accepted with probability alpha_by_depth[k − 1].

    Depths beyond the list take its last entry.
    """
    if depth and not alpha_by_depth:
        raise ValueError("no acceptance was measured")
    total = survival = 1.0
    for at in range(depth):
        survival *= alpha_by_depth[min(at, len(alpha_by_depth) - 1)]
        total += survival
    return total
