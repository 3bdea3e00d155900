"""What trees keep that were never decoded: from how often each rank of a drafted token was right.

A tree that was decoded tells, of every depth, how often the best child of a node was right, the second best, and so on,
given that the node itself was. Taken to be the same below every node of a depth, as in a tree of Medusa's heads, this gives
the chance of any path, and the sum of these what any tree keeps. What it gives for the trees that were decoded is off by a
factor, which serves for those that were not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

from ..drafts.medusa.static_tree import grow, within
from ..speedup.budget import Budget
from ..speedup.cost_model import CostTable
from ..speedup.predict import AcceptanceCounts, Prediction

if TYPE_CHECKING:
    from ..bundle.manifest import DraftInfo

NODES = range(4, 31)
"""Drafted tokens of the trees that are weighed."""

OFFERED = 3
"""How many of them, of different depths, are offered to be decoded."""

NEVER = 1e-9
"""Chance of a rank that was never right: a tree has it where nothing better is left."""

Rates = Sequence[Sequence[float]]
"""By depth, then by rank: chance that this child is right where its parent is."""


def rates(observed: Iterable[AcceptanceCounts]) -> list[list[float]]:
    """Of the trees of one draft together. A rank is never likelier than the one before it; what no tree had is not in."""
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for counted in observed:
        for depth, ranks in enumerate(counted.ranks):
            for rank, (right, judged) in enumerate(ranks):
                before = counts.get((depth, rank), (0, 0))
                counts[depth, rank] = before[0] + right, before[1] + judged
    by_depth: list[list[float]] = []
    for (depth, rank), (right, judged) in sorted(counts.items()):
        if depth == len(by_depth):
            by_depth.append([])
        if judged and depth < len(by_depth) and rank == len(by_depth[depth]):
            by_depth[depth].append(min(right / judged, by_depth[depth][-1] if rank else 1.0))
    return by_depth


def expected_kept(chances: Rates, order: Sequence[int], budget: Budget) -> tuple[float, Budget]:
    """(tokens that a cycle keeps, bonus included, what the tree really has) of the first nodes of an order of growth
    (`rank_tree.Parents`) that a budget has room for."""
    parents, depths, ranks = within(order, budget)
    paths: list[float] = []
    for parent, depth, rank in zip(parents, depths, ranks, strict=True):
        known = depth < len(chances) and rank < len(chances[depth])
        before = paths[parent] if parent >= 0 else 1.0
        paths.append(before * chances[depth][rank] if known else 0.0)
    return 1 + sum(paths), Budget(len(paths), 1 + max(depths, default=-1))


@dataclass(frozen=True)
class Trees:
    """The trees of one draft, by what was observed of some."""

    draft: str
    chances: Rates
    grown: Sequence[int] | None
    """Order of growth of the draft's own trees; None: by the probabilities of each cycle, for which the likeliest tree of
    all cycles stands."""
    factor: float
    """Tokens beyond the first that the widest decoded tree kept over those that `kept` gives for it."""

    def predict(self, table: CostTable, budget: Budget) -> Prediction | None:
        """Decode speed over plain decoding of the tree that a budget becomes, which may be smaller than that; None without
        one."""
        tokens, real = expected_kept(self.chances, self._order(budget), budget)
        if real.empty:
            return None
        tokens = 1 + self.factor * (tokens - 1)
        seconds = table.cycle_seconds(self.draft, real.depth, real.nodes) / table.token_seconds()
        return Prediction(self.draft, real, tokens / seconds, tokens, seconds)

    def best(self, table: CostTable, widest: int) -> list[Prediction]:
        """The fastest tree of every depth, fastest first, at most `OFFERED` of at most `widest` drafted tokens."""
        predictions: list[Prediction] = []
        for depth in range(1, len(self.chances) + 1):
            sizes = [Budget(nodes, depth) for nodes in NODES if depth < nodes <= widest]
            weighed = [(size, self.predict(table, size)) for size in sizes]
            whole = [each for size, each in weighed if each is not None and each.budget == size]
            if whole:
                predictions.append(max(whole, key=lambda each: (each.speedup, -each.budget.nodes)))
        return sorted(predictions, key=lambda each: -each.speedup)[:OFFERED]

    def _order(self, budget: Budget) -> Sequence[int]:
        if self.grown is not None:
            return self.grown
        scores = [[log(max(chance, NEVER)) for chance in depth] for depth in self.chances]
        return grow(scores[: budget.depth], budget.nodes)


def observed_trees(drafts: Iterable[DraftInfo], observed: Sequence[AcceptanceCounts]) -> Mapping[str, Trees]:
    """By draft, what its decoded trees tell of others; without those that had none with counted ranks."""
    trees: dict[str, Trees] = {}
    for draft in drafts:
        mine = [seen for seen in observed if seen.draft == draft.name and seen.ranks and seen.cycles]
        if not mine:
            continue
        widest = max(mine, key=lambda seen: seen.budget.nodes)
        plain = Trees(draft.name, rates(mine), draft.options.static_tree, 1.0)
        tokens, _ = expected_kept(plain.chances, plain._order(widest.budget), widest.budget)
        beyond = widest.tokens_per_cycle(widest.budget.depth) - 1
        factor = beyond / (tokens - 1) if tokens > 1 else 1.0
        trees[draft.name] = Trees(draft.name, plain.chances, draft.options.static_tree, factor)
    return trees
