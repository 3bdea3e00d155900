"""Which draft pays on a device, and by how much: pass times of the device, acceptance that was seen anywhere.

What a draft accepts depends on the model, the draft and the data; what a pass takes depends on the device. Both are
measured apart and meet here, so that a device needs no data to choose by what another one saw. The speed model is that
of `cost_model.py`; everything here is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .budget import Budget
from .cost_model import CostTable
from .stats import Stats

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest

MIN_SPEEDUP = 1.05
"""Predicted speed-up from which speculation is worth its risk."""


@dataclass(frozen=True)
class AcceptanceCounts:
    """What a draft did while it always got `budget`.

    `shapes`: cycles by (drafted nodes, depth); `accepted[k]`: cycles that accepted at least k + 1 tokens;
    `discarded`: accepted tokens that an end token or the limit cut; `ranks[k][r]`, of trees: how often the child of rank r
    of a node of depth k was right, and how often there was one where the node itself was right.
    """

    draft: str
    budget: Budget
    shapes: Mapping[tuple[int, int], int]
    accepted: Sequence[int]
    discarded: int = 0
    ranks: Sequence[Sequence[tuple[int, int]]] = ()

    @classmethod
    def of(cls, draft: str, budget: Budget, stats: Stats) -> AcceptanceCounts:
        """From the counters of requests, see `Stats.total`."""
        accepted = list(stats.accepted_by_depth)
        return cls(draft, budget, dict(stats.shapes), accepted, stats.discarded, _by_rank(stats.ranks))

    @property
    def is_chain(self) -> bool:
        """Whether the budget had no room for branches; shorter chains can be told from it."""
        return self.budget.nodes == self.budget.depth

    @property
    def cycles(self) -> int:
        return sum(self.shapes.values())

    @property
    def evaluated(self) -> list[int]:
        """Cycles of which the drafted token of depth 1, 2, … was judged, as many as `accepted` has: those drafted so deep
        that accepted all before it."""
        deep = [
            sum(n for (_, depth), n in self.shapes.items() if depth > at) for at in range(len(self.accepted))
        ]
        return [min(pair) for pair in zip(deep, [self.cycles, *self.accepted], strict=False)]

    @property
    def alpha(self) -> float:
        """Share of the first drafted tokens that were right; 0 where nothing was drafted."""
        return self.accepted[0] / self.evaluated[0] if self.accepted and self.evaluated[0] else 0.0

    def tokens_per_cycle(self, depth: int) -> float:
        """Tokens that a cycle kept, bonus included, had it drafted no deeper than `depth`."""
        kept, every = sum(self.accepted[:depth]), sum(self.accepted)
        cut = self.discarded * kept / every if every else 0.0
        return 1 + (kept - cut) / self.cycles

    def cycle_seconds(self, table: CostTable, depth: int) -> float:
        """Mean seconds of a cycle by the table, had it drafted no deeper than `depth` (chains)."""
        seconds = 0.0
        for (nodes, deep), count in self.shapes.items():
            fewer = min(nodes, depth) if self.is_chain else nodes
            seconds += count * table.cycle_seconds(self.draft, min(deep, depth), fewer)
        return seconds / self.cycles


def _by_rank(counted: Mapping[tuple[int, int, int], int]) -> list[list[tuple[int, int]]]:
    """`Observed.ranks` of `Stats.ranks`."""
    by_depth: list[list[tuple[int, int]]] = []
    for (depth, children, right), count in sorted(counted.items()):
        while len(by_depth) <= depth:
            by_depth.append([])
        ranks = by_depth[depth]
        ranks += [(0, 0)] * (children - len(ranks))
        for rank in range(children):
            hits, judged = ranks[rank]
            ranks[rank] = hits + count * (rank == right), judged + count
    return by_depth


@dataclass(frozen=True)
class Prediction:
    """How a draft does on a device under a budget. Pays where a cycle keeps more than `break_even` tokens.

    `interval`: of the speed-up, 95 %, where it was measured on enough requests.
    """

    draft: str
    budget: Budget
    speedup: float
    tokens_per_cycle: float
    break_even: float
    interval: tuple[float, float] | None = None


def predict(table: CostTable, seen: AcceptanceCounts, depth: int | None = None) -> Prediction:
    """Decode speed over plain decoding of one sequence, of the observed budget or, for chains, of `depth` tokens.

    Raises `ValueError` without cycles, and for a tree of another depth than was observed.
    """
    if not seen.cycles:
        raise ValueError(f"no cycle of {seen.draft} was observed")
    depth = seen.budget.depth if depth is None else depth
    if not seen.is_chain and depth != seen.budget.depth:
        raise ValueError(f"a tree of depth {seen.budget.depth} does not tell of depth {depth}")
    tokens, seconds = seen.tokens_per_cycle(depth), seen.cycle_seconds(table, depth)
    plain = table.token_seconds()
    budget = Budget.chain(depth) if seen.is_chain else seen.budget
    return Prediction(seen.draft, budget, tokens * plain / seconds, tokens, seconds / plain)


def predictions(table: CostTable, observed: Iterable[AcceptanceCounts]) -> list[Prediction]:
    """Every tree, and every length of every chain, fastest first; of equals the one with fewer nodes. A chain is told from
    the shortest one that was observed and is as long: a longer one starts its cycles in other places."""
    entries: list[Prediction] = []
    chains: dict[str, list[AcceptanceCounts]] = {}
    for seen in observed:
        if seen.cycles and seen.is_chain:
            chains.setdefault(seen.draft, []).append(seen)
        elif seen.cycles:
            entries.append(predict(table, seen))
    for known in chains.values():
        known.sort(key=lambda seen: seen.budget.depth)
        at = 0
        for depth in range(1, known[-1].budget.depth + 1):
            at += depth > known[at].budget.depth
            entries.append(predict(table, known[at], depth))
    return sorted(entries, key=lambda entry: (-entry.speedup, entry.budget.nodes, entry.draft))


def choose(
    table: CostTable, observed: Iterable[AcceptanceCounts], least: float = MIN_SPEEDUP
) -> Prediction | None:
    """The fastest, or None where none reaches `least`."""
    best = next(iter(predictions(table, observed)), None)
    return best if best is not None and best.speedup >= least else None


def choose_by_reward(
    table: CostTable, observed: Sequence[AcceptanceCounts], layers: Mapping[str, int], weight: float
) -> Prediction | None:
    """FastVLM's choice of a layer (arXiv 2510.22641, section 3.3): the draft with the highest C_l − λ·l, with the
    length that is then fastest; None where no draft branches off after a layer.

    The paper's C_l is the confidence of the raw exit, which says little of a trained draft; here it is the measured
    acceptance of the first drafted token.

    Args:
        layers: of the drafts that branch off after one. weight: λ; the paper takes 1/L.
    """
    rewards = {
        seen.draft: seen.alpha - weight * layers[seen.draft] for seen in observed if seen.draft in layers
    }
    if not rewards:
        return None
    best = max(rewards, key=lambda name: (rewards[name], -layers[name]))
    return predictions(table, [seen for seen in observed if seen.draft == best])[0]


def longest_drafts(manifest: Manifest, table: CostTable) -> dict[str, int]:
    """How many tokens each draft of the table may propose: what was timed, and as many as it has heads."""
    widest = max(1, min(manifest.widest_tree, max(table.plain.measured)) - 1)
    heads = {draft.name: draft.options.most_tokens for draft in manifest.drafts}
    return {name: min(widest, heads[name] or widest) for name in table.drafts}


def best_length(table: CostTable, draft: str, alpha: float, longest: int) -> tuple[int, float]:
    """(draft length, speed-up over plain decoding) of the chain that is fastest at this acceptance; 0 drafts nothing."""
    speedups = [(0, 1.0), *((d, table.speedup(draft, [alpha], d)) for d in range(1, longest + 1))]
    return max(speedups, key=lambda each: (each[1], -each[0]))


class TreeGain(NamedTuple):
    """A tree that a draft may be given in place of a chain."""

    budget: Budget
    gain: float
    """Accepted tokens per cycle over those of the chain of its depth, as `tune` saw them."""


class ChainCounts(NamedTuple):
    """What `tune` saw of a draft's chains."""

    accepted: Sequence[int]
    """Drafted tokens that were right, by depth."""
    evaluated: Sequence[int]
    """Drafted tokens that were judged, by depth."""
    hit_rate: float
    """Share of the cycles in which the draft proposed anything."""
