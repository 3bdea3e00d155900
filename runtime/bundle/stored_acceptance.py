"""What drafts accepted, in a manifest: entries without a device, which every device chooses by."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..speedup.budget import Budget
from ..speedup.predict import AcceptanceCounts, ChainCounts, TreeGain
from .schema import Part, checked, integer, list_of, string

if TYPE_CHECKING:
    from .manifest import Manifest

_COUNT = integer(0, 1 << 53)


@dataclass(kw_only=True)
class StoredAcceptance(Part):
    """One entry of `acceptance`: a draft that always got `nodes` and `depth`, on `requests` of `data`.

    `shapes` holds [drafted nodes, depth, cycles], `ranks` by depth and rank [right, judged]; see `AcceptanceCounts` for the rest.
    """

    draft: str = checked(string(100))
    nodes: int = checked(integer(1, 4096))
    depth: int = checked(integer(1, 4096))
    shapes: list[list[int]] = checked(list_of(list_of(_COUNT, 3, 3), 1 << 16))
    accepted: list[int] = checked(list_of(_COUNT, 4096))
    discarded: int = checked(_COUNT)
    ranks: list[list[list[int]]] = checked(
        list_of(list_of(list_of(_COUNT, 2, 2), 4096), 4096), default_factory=list
    )
    requests: int = checked(_COUNT)
    data: str = checked(string(1000))
    date: str = checked(string(40))
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: AcceptanceCounts, requests: int, data: str, date: str) -> StoredAcceptance:
        """An entry from what was observed."""
        shapes = [[*shape, count] for shape, count in sorted(counts.shapes.items())]
        nodes, depth = counts.budget.nodes, counts.budget.depth
        ranks = [[list(pair) for pair in of_depth] for of_depth in counts.ranks]
        return cls(
            draft=counts.draft, nodes=nodes, depth=depth, shapes=shapes, accepted=list(counts.accepted),
            discarded=counts.discarded, ranks=ranks, requests=requests, data=data, date=date,
        )  # fmt: skip

    @property
    def observed(self) -> AcceptanceCounts:
        """The counters without their provenance."""
        shapes = {(nodes, depth): count for nodes, depth, count in self.shapes}
        ranks = [[(right, judged) for right, judged in of_depth] for of_depth in self.ranks]
        budget = Budget(self.nodes, self.depth)
        return AcceptanceCounts(self.draft, budget, shapes, self.accepted, self.discarded, ranks)


def stored_acceptance(manifest: Manifest) -> list[StoredAcceptance]:
    """The entries of a bundle's own drafts. Raises `BundleError` for one that is not an entry."""
    entries = [
        StoredAcceptance.parse(entry, f"acceptance[{at}]") for at, entry in enumerate(manifest.acceptance)
    ]
    return [entry for entry in entries if manifest.draft(entry.draft) is not None]


def measured_chains(manifest: Manifest) -> dict[str, ChainCounts]:
    """By draft, what its longest measured chain accepted, for the controller. Raises `BundleError`."""
    observed = [entry.observed for entry in stored_acceptance(manifest)]
    return {
        name: ChainCounts(counts.accepted, counts.evaluated, sum(n for (nodes, _), n in counts.shapes.items() if nodes) / counts.cycles)
        for name, counts in _longest_chains(observed).items()
    }  # fmt: skip


def measured_trees(manifest: Manifest) -> dict[str, list[TreeGain]]:
    """By draft, the trees that were measured beside a chain as deep, for the controller. Raises `BundleError`."""
    observed = [counts for entry in stored_acceptance(manifest) if (counts := entry.observed).cycles]
    chains = _longest_chains(observed)
    widest = manifest.widest_tree - 1
    trees: dict[str, list[TreeGain]] = {}
    for counts in observed:
        chain, depth = chains.get(counts.draft), counts.budget.depth
        if counts.is_chain or chain is None or depth > chain.budget.depth or counts.budget.nodes > widest:
            continue
        kept = chain.tokens_per_cycle(depth) - 1
        if kept > 0:
            trees.setdefault(counts.draft, []).append(
                TreeGain(counts.budget, (counts.tokens_per_cycle(depth) - 1) / kept)
            )
    return trees


def _longest_chains(observed: Iterable[AcceptanceCounts]) -> dict[str, AcceptanceCounts]:
    chains: dict[str, AcceptanceCounts] = {}
    for counts in observed:
        if counts.is_chain and counts.cycles:
            chains[counts.draft] = max(
                chains.get(counts.draft, counts), counts, key=lambda each: each.budget.depth
            )
    return chains
